"""The prefix cache: why a prompt missed it, and prefixes that stay in it."""

from ridgeline.core.errors import OutOfMemoryError
from ridgeline.engine.client import PinnedPrefix
from ridgeline.server.context import Call, Server
from ridgeline.server.errors import ApiError, bad_request
from ridgeline.server.generation import salt_of
from ridgeline.server.ids import new_id
from ridgeline.server.logprobs import token_text
from ridgeline.server.prompts import tokenize
from ridgeline.server.replies import Reply
from ridgeline.server.routes.plain import text_of
from ridgeline.server.schemas.plain import (
    ExplainRequest,
    MissResponse,
    PrefixCard,
    PrefixList,
    PrefixRequest,
    TextFields,
)


async def explain_miss(call: Call, request: ExplainRequest) -> Reply:
    """How far a prompt is cached for the caller's own key; other keys' prompts play no part."""
    server = call.server
    model = server.check_model(request.model, call.caller)
    ids = await _token_ids(call, request)
    report = await server.engine.explain_miss(
        ids,
        adapter=server.adapter(model),
        cache_salt=salt_of(call.caller.tenant, request.cache_salt or ""),
    )
    return Reply(
        body=MissResponse(
            prompt_tokens=len(ids),
            cached_tokens=report.num_cached,
            matching_tokens=report.num_matching,
            evicted_tokens=report.num_evicted,
            token_id=report.token_id,
            token=_text(server, report.token_id),
            cached_token_id=report.cached_token_id,
            cached_token=_text(server, report.cached_token_id),
        )
    )


async def pin_prefix(call: Call, request: PrefixRequest) -> Reply:
    """Compute a prefix for a key's requests, and keep it."""
    server = call.server
    model = server.check_model(request.model, call.caller)
    if not server.keys.has_tenant(request.tenant):
        raise bad_request(f"There is no key of the name {request.tenant!r}.", "tenant")
    with call.admit(max_tokens=1):
        ids = await _token_ids(call, request)
        try:
            pin = await server.engine.pin_prefix(
                ids,
                request_id=new_id("pin-"),
                adapter=server.adapter(model),
                cache_salt=salt_of(request.tenant, request.cache_salt or ""),
                tenant=request.tenant,
            )
        except OutOfMemoryError as error:  # an admin may know why
            raise bad_request(str(error), call.prompt_field) from None
    return Reply(body=_card(server, pin))


async def list_prefixes(call: Call) -> Reply:
    """All that are pinned."""
    pins = call.server.engine.pinned_prefixes
    return Reply(body=PrefixList(data=[_card(call.server, pin) for pin in pins]))


async def unpin_prefix(call: Call) -> Reply:
    """Let go of one, which stays cached as others do."""
    word = call.path_params["prefix"]
    engine = call.server.engine
    if word not in {str(pin.number) for pin in engine.pinned_prefixes}:
        raise ApiError(404, f"There is no pinned prefix {word!r}.")
    engine.unpin_prefix(int(word))
    return Reply(body={"id": int(word), "object": "pinned_prefix.deleted", "deleted": True})


async def _token_ids(call: Call, request: TextFields) -> tuple[int, ...]:
    text, specials = await text_of(call, request)
    (ids,) = await tokenize(call.server, text, add_special_tokens=specials, param=call.prompt_field)
    return ids


def _text(server: Server, token_id: int | None) -> str | None:
    return None if token_id is None else token_text(server.tokenizer, token_id)


def _card(server: Server, pin: PinnedPrefix) -> PrefixCard:
    return PrefixCard(
        id=pin.number,
        model=pin.adapter or server.model_name,
        tenant=pin.tenant,
        tokens=pin.num_tokens,
        cache_salt=pin.cache_salt.partition("\0")[2] or None,
    )
