"""How the server is: health, load, metrics, usage of each key."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import ridgeline
from ridgeline.core.errors import EngineUnavailableError
from ridgeline.engine.stats import EngineStatus
from ridgeline.server.context import SHUTTING_DOWN, Call, Server
from ridgeline.server.errors import ApiError
from ridgeline.server.live import LiveView
from ridgeline.server.replies import EventStream, Reply, event
from ridgeline.server.schemas.operations import EngineState, ProfileRequest

_LIVE_PERIOD_S = 0.5
_MAX_WATCHERS = 64


async def health(call: Call) -> Reply:
    """200 while the process serves; 503 once its engine is gone for good."""
    state = call.server.monitored.health()
    is_dead = state.status is EngineStatus.DEAD
    return Reply(body={"status": "dead" if is_dead else "ok"}, status=503 if is_dead else 200)


async def ready(call: Call) -> Reply:
    """200 if a request would be taken now, else 503 and why not."""
    status, reason = _readiness(call.server)
    body = {"status": status, "reason": reason}
    if status == EngineStatus.READY:
        return Reply(body=body)
    return Reply(body=body, status=503, headers=((b"retry-after", b"1"),))


def _readiness(server: Server) -> tuple[str, str | None]:
    """Whether requests are taken, in a word, and why not."""
    state = server.monitored.health()
    status, reason = str(state.status), state.reason
    if server.is_draining:
        status, reason = "draining", "The server is shutting down."
    elif state.is_ready and not server.is_warm:
        status, reason = "warming up", server.first_request
    return status, reason


async def engine_state(call: Call) -> Reply:
    """How the engine is, for a router."""
    if call.routed is None:
        raise ApiError(403, "This is for routers with this server's key.")
    server = call.server
    config, stats = server.engine.config, server.engine.stats()
    status, reason = _readiness(server)
    linear = server.engine.summary.linear
    peers = stats.kv_peers
    busy, mbu = server.recent_use.shares(stats.roofline)
    state = EngineState(
        ready=status == EngineStatus.READY,
        reason=reason,
        is_open=server.keys.is_open,
        epoch=f"{server.epoch}.{stats.num_restarts}",
        models=server.served_names,
        max_seqs=config.max_num_seqs,
        kv_tokens=max(config.num_blocks, default=0) * config.block_tokens,
        pass_s=linear.pass_s,
        token_s=linear.token_s,
        pair_s=linear.pair_s,
        curve=server.engine.summary.curve,
        kv_name="" if peers is None else peers.engine,
        kv_token_bytes=0.0 if peers is None else peers.entry_bytes / config.block_tokens,
        kv_sources={
            each.engine: each.bytes_per_s
            for each in (() if peers is None else peers.peers)
            if each.engine and not each.is_absent
        },
        kv_usage=stats.kv_usage,
        hit_rate=stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else None,
        busy=busy,
        mbu=mbu,
    )
    return Reply(body=state)


async def ping(call: Call) -> Reply:
    """The same as health, under the name that some platforms call."""
    return await health(call)


async def version(_: Call) -> Reply:
    """Which Ridgeline this is."""
    return Reply(body={"version": ridgeline.__version__})


async def load(call: Call) -> Reply:
    """How busy the server is."""
    server = call.server
    stats = server.monitored.stats()
    return Reply(
        body={
            "server_load": server.limits.running,
            "batch_lines_running": server.limits.running_lines,
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage": stats.kv_usage,
        }
    )


async def metrics(call: Call) -> Reply:
    """What Prometheus scrapes; other keys' usage is the admin's to see."""
    call.server.prefixes.settle()
    with_tenants = call.caller.is_admin or call.server.keys.is_open
    return Reply(
        body=call.server.metrics.exposition(with_tenants=with_tenants),
        content_type="text/plain; version=0.0.4; charset=utf-8",
    )


async def usage(call: Call) -> Reply:
    """Tokens and cost of every key since the server started."""
    call.server.prefixes.settle()
    tenants: dict[str, dict[str, Any]] = {}
    for family in (*call.server.metrics.tokens.collect(), *call.server.metrics.cost.collect()):
        for sample in family.samples:
            if sample.name.endswith("_total"):
                entry = tenants.setdefault(sample.labels["tenant"], {})
                if (kind := sample.labels.get("kind")) is not None:
                    entry[kind] = int(sample.value)
                else:
                    entry["cost"] = float(f"{sample.value:.12g}")  # a sum of many small numbers
    return Reply(body={"object": "list", "data": [{"tenant": t, **u} for t, u in tenants.items()]})


async def delete_tenant(call: Call) -> Reply:
    """Remove all that is kept for a tenant: files, batches, caches, KV in memory and on disk."""
    tenant = call.path_params["tenant"]
    files, batches = await call.server.jobs.delete_tenant(tenant)
    call.server.prefixes.delete_tenant(tenant)
    if call.server.responses is not None:
        call.server.responses.delete_tenant(tenant)
    if call.server.similar is not None:
        call.server.similar.cache.delete_tenant(tenant)
    await call.server.monitored.delete_tenant(tenant)
    body = {"object": "tenant.deleted", "tenant": tenant, "files": files, "batches": batches}
    return Reply(body={**body, "deleted": True})


async def traffic(call: Call) -> Reply:
    """Lengths and arrivals of the latest requests, and where they are no longer what they were."""
    server = call.server
    server.metrics.traffic.look(server.engine.stats().roofline)
    return Reply(body=server.metrics.traffic.to_json(settings=server.settings))


async def profile(call: Call, wanted: ProfileRequest) -> Reply:
    """Where the seconds of the engine's next steps go."""
    found = await call.server.engine.profile(
        wanted.steps, timeout_s=wanted.timeout_s, by_layer=wanted.per_layer
    )
    return Reply(body=found)


async def live(call: Call) -> EventStream:
    """What the web page draws, twice a second."""
    server = call.server

    async def events() -> AsyncGenerator[bytes, None]:
        if server.num_watchers >= _MAX_WATCHERS:
            raise ApiError(429, "As many watch as may.", retry_after_s=_LIVE_PERIOD_S)
        view = LiveView(server.monitored, server.metrics)
        server.num_watchers += 1
        try:
            while not server.is_draining:
                yield event(view.snapshot())
                await asyncio.sleep(_LIVE_PERIOD_S)
            raise EngineUnavailableError(SHUTTING_DOWN)
        finally:
            server.num_watchers -= 1

    return EventStream(events=events())
