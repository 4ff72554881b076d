"""``serve --replicas N``: engines of one machine as servers of their own, behind one port."""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.core.config import DEFAULT_KV_SHARE, EngineConfig
from ridgeline.core.errors import EngineError, SettingsError
from ridgeline.core.host import available_memory_bytes
from ridgeline.core.private_folder import PrivateFolder
from ridgeline.core.ray_cluster import check_ray
from ridgeline.core.settings.parallel import WITHOUT_RAY
from ridgeline.executors import default_executor, executor_traits
from ridgeline.fleet.config import RouterConfig
from ridgeline.fleet.ray_replica import ReplicaOnRay, check_reachable
from ridgeline.fleet.replica import ReplicaProcess, ReplicaStart
from ridgeline.fleet.router import Router
from ridgeline.fleet.serving import run
from ridgeline.server.config import ServerConfig
from ridgeline.server.jobs.folder import default_folder
from ridgeline.server.keys import KeyRing
from ridgeline.server.serving import Announce, check_certificate, open_listener, run_to_end

_log = logging.getLogger(__name__)


def serve_replicas(
    engine_config: EngineConfig,
    config: ServerConfig,
    count: int,
    *,
    max_count: int | None = None,
    router: dict[str, Any] | None = None,
    announce: Announce = print,
    on_listening: Callable[[str], object] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then let what is in progress end.

    Each replica has its part of the processors and of the memory for KV; the first has the data
    folder. With ``max_count`` there are ``count`` to so many, as the load asks for (`Autoscaler`),
    and parts are those of the most. ``router`` has more settings of `RouterConfig`.

    Raises:
        EngineError: a replica cannot be started.
        RidgelineError: a setting is wrong, or the port is taken.
    """
    name = engine_config.executor
    traits = executor_traits(default_executor() if name == "auto" else name)
    if traits.missing() is None and traits.device_bytes() is not None:
        raise SettingsError(
            f"Replicas share a machine's processors; executor {traits.name} has one engine."
        )
    if engine_config.kv_peer_address is not None:
        raise SettingsError("kv_peer_address is of one engine; replicas may share kv_redis_url.")
    if (router or {}).get("disaggregate", "off") != "off":
        raise SettingsError(
            "disaggregate is of engines that read KV of each other (--kv-peers), and of the router "
            "before them; replicas of one machine do not."
        )
    if config.join:
        raise SettingsError("join is of one engine: each machine's replicas have their own router.")
    if engine_config.launcher == "ray":
        check_reachable(config)
        check_ray()
        if engine_config.workers:
            raise SettingsError("A replica on a node of Ray's is one machine: leave `workers` out.")
    KeyRing(config).check_policy(engine_config.scheduling_policy)
    check_certificate(config)
    settings = _router_config(config, router or {}, count, max_count)
    with PrivateFolder() as folder:
        key_file = folder / "router-key"
        key_file.touch(mode=0o600)
        key_file.write_bytes(secrets.token_bytes(32))
        # With a key of the user's, engines of other machines may join.
        chosen = config.router_key_file or str(key_file)
        config = replace(config, router_key_file=chosen)
        settings = replace(settings, router_key_file=chosen)
        run_to_end(
            _serve(engine_config, config, count, max_count, settings, announce, on_listening)
        )


def _router_config(
    config: ServerConfig, router: dict[str, Any], count: int, max_count: int | None
) -> RouterConfig:
    """The router's settings, as far as they are known before there are engines."""
    scaling = {"slo": config.slo, "min_replicas": count, "max_replicas": max_count}
    return RouterConfig(
        engine=("http://127.0.0.1:1",),
        host=config.host,
        max_body_mib=config.max_body_mib,
        body_timeout_s=config.body_timeout_s,
        stall_timeout_s=config.stall_timeout_s,
        silence_s=3 * config.ping_s,
        drain_s=config.drain_s,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        **(scaling if max_count else {}) | router,
    )


async def _serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    count: int,
    max_count: int | None,
    settings: RouterConfig,
    announce: Announce,
    on_listening: Callable[[str], object] | None,
) -> None:
    with closing(open_listener(config)) as listener:
        port = listener.getsockname()[1]
        most = max_count or count
        local = OwnReplicas(make_replicas(engine_config, config, most, port=port))
        loop = asyncio.get_running_loop()
        try:
            begin_s = loop.time()
            urls = await asyncio.gather(*(local.start() for _ in range(count)))
            settings = replace(settings, engine=tuple(urls), port=port)
            if max_count is not None:
                settings = replace(settings, start_s=loop.time() - begin_s)
            local.router = Router(settings)
            await run(local.router, listener, announce, on_listening, replicas=local)
        finally:
            await local.close()


def make_replicas(
    engine_config: EngineConfig, config: ServerConfig, count: int, *, port: int
) -> list[ReplicaProcess]:
    """Those of a router on ``port``, none of them started. Of those that Ray starts the first is on
    this machine, since it has the data folder."""
    if engine_config.launcher == "local":
        return [
            ReplicaProcess(each) for each in replica_starts(engine_config, config, count, port=port)
        ]
    own = replace(engine_config, **WITHOUT_RAY)
    (first,) = replica_starts(own, config, 1, port=port)
    other = replace(config, port=0, ssl_keyfile=None, ssl_certfile=None)
    others = [ReplicaStart(engine=engine_config, server=other) for _ in range(1, count)]
    return [ReplicaProcess(first), *map(ReplicaOnRay, others)]


def replica_starts(
    engine_config: EngineConfig, config: ServerConfig, count: int, *, port: int
) -> list[ReplicaStart]:
    """What each replica is started with, behind a router on ``port``.

    Processors are dealt out in runs; where there are fewer than replicas, some share one.
    """
    usable = sorted(os.sched_getaffinity(0))
    folder = Path(config.data_dir or default_folder(port))
    if engine_config.kv_cache_memory_bytes is None:
        share = int(available_memory_bytes() * DEFAULT_KV_SHARE) // count
        engine_config = replace(engine_config, kv_cache_memory_bytes=share)
    starts = []
    for number in range(count):
        first, last = number * len(usable) // count, (number + 1) * len(usable) // count
        server = replace(
            config,
            host="127.0.0.1",
            port=0,
            ssl_keyfile=None,
            ssl_certfile=None,
            data_dir=str(folder if number == 0 else folder / f"replica-{number}"),
        )
        processors = tuple(usable[first : max(last, first + 1)])
        starts.append(ReplicaStart(engine=engine_config, server=server, processors=processors))
    return starts


class OwnReplicas:
    """The replicas of one router: those that run, and those that may be started.

    ``router``, once there is one, is told when a replica that was lost runs on at another URL.
    """

    router: Router | None = None

    def __init__(self, replicas: Sequence[ReplicaProcess]) -> None:
        self._all = tuple(replicas)
        self._free = list(enumerate(replicas))  # the first of these goes first
        self._running: list[tuple[int, ReplicaProcess]] = []
        self._moved_to: dict[str, str] = {}

    async def start(self) -> str:
        """Start the first that does not run; returns its URL once it listens.

        Raises:
            EngineError: it ended before, or all run.
        """
        if not self._free:
            raise EngineError("There is no place left for another replica.")
        self._free.sort(key=lambda each: each[0])
        number, replica = self._free.pop(0)
        try:
            url = await replica.start()
        except BaseException:
            await replica.end()
            self._free.append((number, replica))
            raise
        self._moved_to.pop(url, None)  # whoever was there has moved, and nobody ends it by this
        replica.keep(self._moved)
        self._running.append((number, replica))
        return url

    async def end(self, url: str) -> None:
        """Let one drain, end it wherever it is by now, and have its place back."""
        while url in self._moved_to:
            url = self._moved_to.pop(url)
        for each in [each for each in self._running if each[1].url == url]:
            self._running.remove(each)
            await each[1].end()
            self._free.append(each)

    async def close(self) -> None:
        """End all, and those that are being started or ended."""
        await asyncio.gather(*(each.end() for each in self._all))

    async def _moved(self, before: str, now: str) -> None:
        self._moved_to[before] = now
        self._moved_to.pop(now, None)
        if self.router is None:
            return
        known = [each for each in self.router.engines if each.pool.url == before]
        if any(each.is_leaving for each in known):  # whoever has it leave ends it
            return
        await self.router.add_engine(now)
        for engine in known:
            await self.router.retire(engine, drain_s=0.0)
