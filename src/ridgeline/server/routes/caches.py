"""``/v1/caches``: prefixes that a client names instead of sending them again."""

import time

from ridgeline.planning.cost import token_storage_cost
from ridgeline.server.context import Call, Server
from ridgeline.server.cost import cost_of
from ridgeline.server.errors import ApiError, bad_request
from ridgeline.server.generation import priority_of, salt_of, usage_of
from ridgeline.server.ids import new_id
from ridgeline.server.named_prefixes import NamedPrefix
from ridgeline.server.prompts import tokenize
from ridgeline.server.replies import Reply, encode
from ridgeline.server.routes.chat import message_inputs, tool_specs
from ridgeline.server.routes.plain import text_of
from ridgeline.server.schemas.caches import (
    CacheCard,
    CacheChange,
    CacheList,
    CacheRequest,
    CacheStorage,
)
from ridgeline.server.schemas.generation import Usage


async def create_cache(call: Call, request: CacheRequest) -> Reply:
    """Compute a prefix and keep its KV, for requests that name it."""
    server, caller = call.server, call.caller
    if server.pool is not None:
        raise bad_request("Named prefixes need a server of one model, which stays.", "model")
    model = server.check_model(request.model, caller)
    if request.tenant is not None and request.tenant != caller.tenant:
        if not caller.is_admin:
            raise ApiError(403, "Only the admin key may name a tenant.", param="tenant")
        if not server.keys.has_tenant(request.tenant):
            raise bad_request(f"There is no key of the name {request.tenant!r}.", "tenant")
    _check_ttl(call, request.ttl)
    tenant, salt = request.tenant or caller.tenant, request.cache_salt or ""
    with call.admit(max_tokens=1):
        text, specials = await text_of(call, request)
        (ids,) = await tokenize(server, text, add_special_tokens=specials, param=call.prompt_field)
        call.charge_input(len(ids))
        messages = request.messages or ()
        prefix = NamedPrefix(
            id=new_id("cache_"),
            tenant=tenant,
            model=model,
            adapter=server.adapter(model),
            cache_salt=salt,
            salt=salt_of(tenant, salt),
            prompt=request.prompt,
            messages=message_inputs(messages),
            tools=tool_specs(request.tools),
            variables=request.chat_template_kwargs or {},
            token_ids=ids,
            num_bytes=len(encode(request)),
            created=int(time.time()),
        )
        await server.prefixes.add(
            prefix, ttl_s=request.ttl, priority=priority_of(call), is_limited=not caller.is_admin
        )
    call.prompt_tokens = len(ids)
    cost = cost_of(call)
    server.metrics.meter(call).close(None if cost is None else cost.total)
    return Reply(body=_card(server, prefix, usage_of(call)))


async def list_caches(call: Call) -> Reply:
    """The key's own; with the admin key those of all."""
    found = call.server.prefixes.of(None if call.caller.is_admin else call.caller.tenant)
    return Reply(body=CacheList(data=[_card(call.server, each) for each in found]))


async def get_cache(call: Call) -> Reply:
    """One of them."""
    return Reply(body=_card(call.server, _named(call)))


async def change_cache(call: Call, change: CacheChange) -> Reply:
    """Let it expire at another time."""
    prefix = _named(call)
    _check_ttl(call, change.ttl)
    call.server.prefixes.extend(prefix, change.ttl)
    return Reply(body=_card(call.server, prefix))


async def delete_cache(call: Call) -> Reply:
    """Let go of it; its KV stays cached as others' does."""
    prefix = _named(call)
    call.server.prefixes.delete(prefix)
    return Reply(body={"id": prefix.id, "object": "cached_content.deleted", "deleted": True})


async def delete_responses(call: Call) -> Reply:
    """Forget the key's answers, all or one."""
    server, tenant = call.server, call.caller.tenant
    similar = None if server.similar is None else server.similar.cache
    caches = [cache for cache in (server.responses, similar) if cache is not None]
    if not caches:
        raise ApiError(404, "This server keeps no answers (see --response-cache-mib).")
    entry = call.path_params.get("response")
    count = sum(
        cache.delete_tenant(tenant) if entry is None else cache.delete(tenant, entry)
        for cache in caches
    )
    if entry is not None and not count:
        raise ApiError(404, f"There is no answer {entry[:80]!r}.")
    return Reply(body={"object": "response_cache.deleted", "deleted": count})


def _named(call: Call) -> NamedPrefix:
    prefix_id = call.path_params["cache_id"]
    return call.server.prefixes.get(call.caller.tenant, prefix_id, sees_all=call.caller.is_admin)


def _check_ttl(call: Call, ttl_s: float | None) -> None:
    if ttl_s is None and not call.caller.is_admin:
        raise bad_request(
            "ttl must be a number of seconds; only the admin key may set none.", "ttl"
        )


def _card(server: Server, prefix: NamedPrefix, usage: Usage | None = None) -> CacheCard:
    server.prefixes.settle([prefix])
    price = server.config.price_storage
    return CacheCard(
        id=prefix.id,
        model=prefix.model,
        tenant=prefix.tenant,
        created_at=prefix.created,
        expires_at=prefix.expires_at,
        tokens=len(prefix.token_ids),
        pinned_tokens=prefix.num_pinned,
        cache_salt=prefix.cache_salt or None,
        storage=CacheStorage(
            token_hours=prefix.token_hours,
            cost=None if price is None else token_storage_cost(prefix.token_hours, price),
        ),
        usage=usage,
    )
