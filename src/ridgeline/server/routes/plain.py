"""Models and the tokenize family."""

from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET

from ridgeline.engine.prompts import check_length
from ridgeline.server.answers import prompt_of
from ridgeline.server.context import Call, Server
from ridgeline.server.conversation import ChatInput
from ridgeline.server.errors import bad_request
from ridgeline.server.logprobs import token_text
from ridgeline.server.pool.pool import ModelPool, PooledModel
from ridgeline.server.prompts import check_in_vocabulary
from ridgeline.server.replies import Reply
from ridgeline.server.routes.chat import message_inputs, tool_specs
from ridgeline.server.routes.paging import page_ends, page_limit
from ridgeline.server.schemas.plain import (
    MODELS_QUERY,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    ModelRequest,
    TextFields,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)


async def list_models(call: Call) -> Reply:
    """Every model that a request can name, in the form of who asks: Anthropic's send a version."""
    server = call.server
    names, has_more = server.models_of(call.caller), False
    is_of_anthropic = b"anthropic-version" in call.headers
    if is_of_anthropic or not MODELS_QUERY.keys().isdisjoint(call.query):
        names, has_more = _page(call, names)
    if is_of_anthropic:
        cards = [_anthropic_card(server, name) for name in names]
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
        none = {"first_id": None, "last_id": None}
        return Reply(body={"data": cards, "has_more": has_more} | none | ends)
    return Reply(body=ModelList(data=[_card(server, name) for name in names]))


def _page(call: Call, names: list[str]) -> tuple[list[str], bool]:
    """As many as are wanted after one of them, or before, as Anthropic's clients ask; are there
    more?"""
    limit = page_limit(call, 1000, default=1000)
    after, before = page_ends(call)
    for name, cursor in (("after_id", after), ("before_id", before)):
        if cursor not in (None, *names):
            raise bad_request(f"{name} must be the id of a model of this list.", name)
    if before is not None:
        names = names[: names.index(before)]
        return names[-limit:], len(names) > limit
    if after is not None:
        names = names[names.index(after) + 1 :]
    return names[:limit], len(names) > limit


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
    server = server.view_of(name)
    adapter, facts, model = server.adapter(name), server.facts, server.model
    return ModelCard(
        id=name,
        created=server.created,
        max_model_len=facts.context,
        root=facts.root if adapter is None else adapter,
        parent=None if adapter is None else server.model_name,
        state=UNSET if model is None else model.state,
        memory_bytes=UNSET if model is None else model.tenancy.num_bytes,
        load_s=UNSET if model is None else round(model.tenancy.load_s, 3),
        failure=UNSET if model is None or model.failure is None else model.failure,
    )


async def load_model(call: Call, request: ModelRequest) -> Reply:
    """Load one of several models, if it is not; it is here when this answers."""
    model = _pooled(call, request)
    async with model_pool(call).lease(model):
        pass
    return Reply(body=_card(call.server, request.model))


async def unload_model(call: Call, request: ModelRequest) -> Reply:
    """Let one of several models go."""
    await model_pool(call).unload(_pooled(call, request))
    return Reply(body=_card(call.server, request.model))


def model_pool(call: Call) -> ModelPool:
    """The pool; ApiError 400 where there is one model, which stays."""
    if call.server.pool is None:
        raise bad_request("This server has one model, which stays loaded (see serve --memory).")
    return call.server.pool


def _pooled(call: Call, request: ModelRequest) -> PooledModel:
    model_pool(call)
    model = call.server.view_of(call.server.check_model(request.model, call.caller)).model
    assert model is not None
    return model


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
        turns = await call.read(message_inputs, request.messages)
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
