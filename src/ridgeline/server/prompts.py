"""Prompts of a request, as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.core.errors import RequestError
from ridgeline.core.sampling_params import MAX_TOKENS
from ridgeline.engine.prompts import check_length
from ridgeline.server.context import Call, Server
from ridgeline.server.errors import bad_request, named_field
from ridgeline.server.schemas.completions import MAX_PROMPTS
from ridgeline.server.schemas.generation import PredictedOutput

_SHORT_TEXT_CHARS = 2048  # tokenized in the time that a thread takes to start
RawPrompt = str | list[int]


def split_prompts(value: str | list[Any], param: str) -> list[RawPrompt]:
    """A string, token ids, or a list of either, as a list of prompts; ApiError if none of these."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise bad_request(f"{param} must not be empty.", param)
    if all(_is_token_id(item) for item in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"{param} may hold {MAX_PROMPTS} prompts at the most.", param)
    for item in value:
        is_ids = isinstance(item, list) and item and all(_is_token_id(token) for token in item)
        if not (isinstance(item, str) or is_ids):
            raise bad_request(
                f"{param} must be a string, a list of token ids, or a list of either.", param
            )
    return value


def count_prompts(value: str | list[Any]) -> int:
    """How many prompts `split_prompts` makes of a field, without a look at each token."""
    is_list = isinstance(value, list) and bool(value) and not _is_token_id(value[0])
    return len(value) if is_list else 1


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKENS


async def expected_tokens(call: Call, prediction: PredictedOutput | None) -> tuple[int, ...]:
    """Token ids of the output that a request predicts, as far as a context is long; none where
    nobody drafts them. What comes of it is in the call's usage."""
    if prediction is None:
        return ()
    server, call.drafted_tokens = call.server, 0
    if not (prediction.text and server.engine.config.takes_predictions):
        return ()
    (ids,) = await tokenize(
        server, prediction.text, add_special_tokens=False, param="prediction", is_cut=True
    )
    return ids[: server.engine.config.max_model_len]


async def tokenize(
    server: Server,
    value: str | list[Any],
    *,
    add_special_tokens: bool = True,
    param: str = "prompt",
    is_cut: bool = False,
) -> list[tuple[int, ...]]:
    """Token ids of each prompt in a field of a request: a string, token ids, or a list of either.

    ``is_cut``: the prompts are truncated afterwards, so none is too long. What takes time is done
    in a thread, and for text without the interpreter's lock.

    Raises:
        ApiError, InvalidRequestError: not as described, no tokenizer, no token, or no such token.
        ContextLengthError: a prompt is at once seen to be longer than the context.
    """
    max_model_len = None if is_cut else server.engine.config.max_model_len

    def work() -> list[tuple[int, ...]]:
        return [
            _token_ids(server, prompt, add_special_tokens, param, max_model_len)
            for prompt in split_prompts(value, param)
        ]

    if isinstance(value, str) and len(value) <= _SHORT_TEXT_CHARS:
        return work()
    texts = [value] if isinstance(value, str) else value[:MAX_PROMPTS]
    num_chars = sum(len(text) for text in texts if isinstance(text, str))
    return await server.in_thread(work, num_chars=num_chars)


def _token_ids(
    server: Server, prompt: RawPrompt, add_special_tokens: bool, param: str, limit: int | None
) -> tuple[int, ...]:
    if limit is not None:
        check_length(prompt, server.engine.tokenizer, limit)
    if isinstance(prompt, str):
        tokenizer = server.tokenizer
        ids = tokenizer.encode(prompt, add_special_tokens)
        if not ids and tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id]
    else:
        ids = prompt
    if not ids:
        raise bad_request(f"The {param} has no tokens.", param)
    check_in_vocabulary(server, ids, param)
    return tuple(ids)


def check_in_vocabulary(server: Server, token_ids: Sequence[int], param: str) -> None:
    """ApiError 400 for a token id that the model does not have."""
    vocab_size, largest = server.engine.spec.vocab_size, max(token_ids, default=0)
    if largest >= vocab_size:
        raise bad_request(
            f"Token id {largest} in {param} is not in the vocabulary of {vocab_size}.", param
        )


def truncate(
    token_ids: tuple[int, ...], limit: int | None, context: int, output_tokens: int | None = None
) -> tuple[int, ...]:
    """The last ``limit`` tokens; −1 is as many as leave room for the output in the context, which
    without ``output_tokens`` is one token."""
    if limit is None:
        return token_ids
    if limit == 0:
        raise bad_request("truncate_prompt_tokens must not be 0.", "truncate_prompt_tokens")
    room = max(1, context - (output_tokens or 1))
    return token_ids[-(room if limit == -1 else limit) :]


def check_room(
    token_ids: tuple[int, ...], output_tokens: int | None, context: int, param: str
) -> None:
    """Refuse an output limit that, after this prompt, no output could reach.

    OpenAI and vLLM do the same: who asks for 4,000 tokens is not to take 900 for all there was to
    say. Without a limit the context is one, and a prompt that alone is too long is the engine's
    to refuse.
    """
    length = len(token_ids)
    if output_tokens is not None and length < context < length + output_tokens:
        raise bad_request(
            f"The context holds {context} tokens; the prompt has {length} and {param} asks for "
            f"{output_tokens} more, which is {length + output_tokens - context} too many.",
            param,
            "context_length_exceeded",
        )


async def render(
    server: Server,
    messages: Sequence[Mapping[str, Any]],
    *,
    param: str = "messages",
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a conversation by the model's template, rendered off the event loop.

    ``param``: where the request has the messages.
    """
    template = server.chat_template

    def work() -> str:
        return template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=variables,
        )

    try:
        return await server.in_thread(work)
    except RequestError as error:
        raise bad_request(str(error), named_field(str(error)) or param) from error
