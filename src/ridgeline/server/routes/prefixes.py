"""The prefix cache: why a prompt missed it."""

from ridgeline.server.context import Call, Server
from ridgeline.server.generation import salt_of
from ridgeline.server.logprobs import token_text
from ridgeline.server.prompts import tokenize
from ridgeline.server.replies import Reply
from ridgeline.server.routes.plain import text_of
from ridgeline.server.schemas.plain import (
    ExplainRequest,
    MissResponse,
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


async def _token_ids(call: Call, request: TextFields) -> tuple[int, ...]:
    text, specials = await text_of(call, request)
    (ids,) = await tokenize(call.server, text, add_special_tokens=specials, param=call.prompt_field)
    return ids


def _text(server: Server, token_id: int | None) -> str | None:
    return None if token_id is None else token_text(server.tokenizer, token_id)
