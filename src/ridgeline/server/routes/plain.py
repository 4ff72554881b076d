"""Embeddings, models and the tokenize family."""

import asyncio
import base64
from collections.abc import Coroutine, Iterable
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import NotFiniteError
from ridgeline.engine.prompts import check_length
from ridgeline.server.answers import prompt_of
from ridgeline.server.context import Call, Server
from ridgeline.server.conversation import ChatInput
from ridgeline.server.cost import cost_of
from ridgeline.server.errors import bad_request
from ridgeline.server.generation import priority_of, salt_of
from ridgeline.server.ids import new_id
from ridgeline.server.logprobs import token_text
from ridgeline.server.prompts import check_in_vocabulary, count_prompts, tokenize, truncate
from ridgeline.server.replies import Reply
from ridgeline.server.routes.chat import message_input, tool_specs
from ridgeline.server.schemas.plain import (
    DetokenizeRequest,
    DetokenizeResponse,
    EmbeddingItem,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
    ModelCard,
    ModelList,
    TextFields,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)

T = TypeVar("T")
Vector = npt.NDArray[np.float32]


async def embeddings(call: Call, request: EmbeddingRequest) -> Reply:
    """The pooled, normalised hidden state of each input."""
    server = call.server
    model = server.check_model(request.model, call.caller)
    width = server.engine.spec.hidden_size
    size = request.dimensions or width
    if size > width:
        raise bad_request(f"dimensions may be {width} at the most.", "dimensions")
    context, limit = server.engine.config.max_model_len, request.truncate_prompt_tokens
    with call.admit(num_outputs=count_prompts(request.input)):
        inputs = await tokenize(server, request.input, param="input", is_cut=limit is not None)
        prompts = [truncate(ids, limit, context) for ids in inputs]
        call.charge_input(sum(map(len, prompts)))
        embedding = [
            server.engine.embed(
                prompt,
                request_id=new_id("emb-"),
                adapter=server.adapter(model),
                cache_salt=salt_of(call.caller.tenant),
                tenant=call.caller.tenant,
                priority=priority_of(call),
            )
            for prompt in prompts
        ]
        found = await _together(embedding)
    call.prompt_tokens = sum(map(len, prompts))
    cost = cost_of(call)
    server.metrics.meter(call).close(None if cost is None else cost.total)
    vectors = [_shortened(each.vector, size) for each in found]
    if not all(np.isfinite(vector).all() for vector in vectors):
        raise NotFiniteError
    as_base64 = request.encoding_format == "base64"
    return Reply(
        body=EmbeddingResponse(
            data=[
                EmbeddingItem(
                    index=index,
                    embedding=_base64(vector) if as_base64 else vector.tolist(),
                )
                for index, vector in enumerate(vectors)
            ],
            model=model,
            usage=EmbeddingUsage(
                prompt_tokens=call.prompt_tokens, total_tokens=call.prompt_tokens, cost=cost
            ),
        )
    )


async def _together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; raises the first failure as it is, and cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except* Exception as failures:
        first = failures.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first


def _shortened(vector: Vector, size: int) -> Vector:
    """The first numbers, of length 1 again."""
    part = np.asarray(vector, dtype=np.float32)[:size]
    norm = float(np.linalg.norm(part))
    return part / norm if norm > 0 else part


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


async def list_models(call: Call) -> Reply:
    """Every model that a request can name, in the form of who asks: Anthropic's send a version."""
    server = call.server
    names = server.models_of(call.caller)
    if b"anthropic-version" in call.headers:
        cards = [_anthropic_card(server, name) for name in names]
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
        none = {"first_id": None, "last_id": None}
        return Reply(body={"data": cards, "has_more": False} | none | ends)
    return Reply(body=ModelList(data=[_card(server, name) for name in names]))


async def get_model(call: Call) -> Reply:
    """One of them."""
    name = call.server.check_model(call.path_params["model"], call.caller)
    if b"anthropic-version" in call.headers:
        return Reply(body=_anthropic_card(call.server, name))
    return Reply(body=_card(call.server, name))


def _anthropic_card(server: Server, name: str) -> dict[str, str]:
    created = datetime.fromtimestamp(server.created, UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def _card(server: Server, name: str) -> ModelCard:
    adapter = server.adapter(name)
    return ModelCard(
        id=name,
        created=server.created,
        max_model_len=server.engine.config.max_model_len,
        root=server.engine.model_name if adapter is None else adapter,
        parent=None if adapter is None else server.model_name,
    )


async def tokenize_text(call: Call, request: TokenizeRequest) -> Reply:
    """Token ids of a text or a conversation, as generation would see them."""
    server = call.server
    server.check_model(request.model, call.caller)
    if request.content is None:
        text, specials = await text_of(call, request)
    elif request.prompt is not None or request.messages is not None:
        raise bad_request("content is another word for prompt: give one of them.", "content")
    else:
        text, specials = request.content, request.add_special
    tokenizer, context = server.tokenizer, server.engine.config.max_model_len
    check_length(text, tokenizer, context)

    def work() -> TokenizeResponse:
        tokens = tokenizer.encode(text, specials)
        strings = None
        if request.return_token_strs:
            strings = [token_text(tokenizer, token) for token in tokens]
        shown: list[Any] = tokens
        if request.with_pieces:
            shown = [{"id": token, "piece": token_text(tokenizer, token)} for token in tokens]
        return TokenizeResponse(
            count=len(tokens), max_model_len=context, tokens=shown, token_strs=strings
        )

    return Reply(body=await server.in_thread(work, num_chars=len(text)))


async def text_of(call: Call, request: TextFields) -> tuple[str, bool]:
    """The prompt as text, and whether special tokens are added to it."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt")
    text, specials = request.prompt, True
    if request.messages is not None:
        specials, call.prompt_field = False, "messages"
        turns = [message_input(m, f"messages[{i}]") for i, m in enumerate(request.messages)]
        text = await prompt_of(
            call,
            ChatInput(
                messages=turns,
                tools=tool_specs(request.tools),
                variables=request.chat_template_kwargs or {},
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
            ),
        )
    if request.add_special_tokens is not None:
        specials = request.add_special_tokens
    assert text is not None
    return text, specials


async def detokenize(call: Call, request: DetokenizeRequest) -> Reply:
    """The text of token ids."""
    server = call.server
    server.check_model(request.model, call.caller)
    tokenizer = server.tokenizer

    def work() -> str:
        check_in_vocabulary(server, request.tokens, "tokens")
        return tokenizer.decode(request.tokens, skip_special_tokens=False)

    text = await server.in_thread(work)
    return Reply(body=DetokenizeResponse(prompt=text, content=text))


async def tokenizer_info(call: Call) -> Reply:
    """What a client needs to know of the tokenizer."""
    server = call.server
    tokenizer = server.tokenizer
    special = tokenizer.special_tokens
    eos = special.get("eos_token")
    return Reply(
        body=TokenizerInfo(
            vocab_size=tokenizer.vocab_size,
            bos_token=special.get("bos_token"),
            eos_token=eos,
            pad_token=special.get("pad_token"),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=None if eos is None else tokenizer.token_to_id(eos),
            eos_token_ids=sorted(tokenizer.eos_token_ids),
            max_model_len=server.engine.config.max_model_len,
            chat_template=server.template_source or None,
        )
    )
