"""``serve --replicas N``: engines of one machine as servers of their own, behind one port."""

import asyncio
import contextlib
import logging
import os
import secrets
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path

import msgspec

from ridgeline.core import wire
from ridgeline.core.config import DEFAULT_KV_SHARE, EngineConfig
from ridgeline.core.errors import EngineError, SettingsError
from ridgeline.core.host import available_memory_bytes
from ridgeline.executors import default_executor, executor_traits
from ridgeline.fleet.config import RouterConfig
from ridgeline.fleet.policies import PolicyName
from ridgeline.fleet.router import Router
from ridgeline.fleet.serving import run
from ridgeline.server.config import ServerConfig
from ridgeline.server.jobs.folder import default_folder
from ridgeline.server.keys import KeyRing
from ridgeline.server.serving import Announce, check_certificate, open_listener

_log = logging.getLogger(__name__)
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_END_S = 5.0  # more than they take to drain


class ReplicaStart(msgspec.Struct):
    """What a replica's process is told: settings, and the processors that it may use."""

    engine: EngineConfig
    server: ServerConfig
    processors: tuple[int, ...]


def serve_replicas(
    engine_config: EngineConfig,
    config: ServerConfig,
    count: int,
    *,
    max_count: int | None = None,
    policy: PolicyName = "price",
    announce: Announce = print,
    on_listening: Callable[[str], object] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then let what is in progress end.

    Each replica has its part of the processors and of the memory for KV; the first has the data
    folder. With ``max_count`` there are ``count`` to so many, as the load asks for (`Autoscaler`),
    and parts are those of the most.

    Raises:
        EngineError: a replica cannot be started.
        RidgelineError: a setting is wrong, or the port is taken.
    """
    import uvloop

    name = engine_config.executor
    traits = executor_traits(default_executor() if name == "auto" else name)
    if traits.missing() is None and traits.device_bytes() is not None:
        raise SettingsError(
            f"Replicas share a machine's processors; executor {traits.name} has one engine."
        )
    if engine_config.kv_peer_address is not None:
        raise SettingsError("kv_peer_address is of one engine; replicas may share kv_redis_url.")
    KeyRing(config).check_policy(engine_config.scheduling_policy)
    check_certificate(config)
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as folder:  # mode 0700
        key_file = Path(folder) / "router-key"
        key_file.touch(mode=0o600)
        key_file.write_bytes(secrets.token_bytes(32))
        config = replace(config, router_key_file=str(key_file))
        uvloop.run(_serve(engine_config, config, count, max_count, policy, announce, on_listening))


async def _serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    count: int,
    max_count: int | None,
    policy: PolicyName,
    announce: Announce,
    on_listening: Callable[[str], object] | None,
) -> None:
    with closing(open_listener(config)) as listener:
        port = listener.getsockname()[1]
        most = max_count or count
        local = LocalReplicas(replica_starts(engine_config, config, most, port=port))
        loop = asyncio.get_running_loop()
        try:
            begin_s = loop.time()
            urls = await asyncio.gather(*(local.start() for _ in range(count)))
            router = RouterConfig(
                engine=tuple(urls),
                policy=policy,
                router_key_file=config.router_key_file,
                host=config.host,
                port=port,
                max_body_mib=config.max_body_mib,
                body_timeout_s=config.body_timeout_s,
                stall_timeout_s=config.stall_timeout_s,
                silence_s=3 * config.ping_s,
                drain_s=config.drain_s,
                slo=config.slo if max_count else None,
                min_replicas=count if max_count else 1,
                max_replicas=max_count,
                start_s=loop.time() - begin_s if max_count else 60.0,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
            )
            await run(Router(router), listener, announce, on_listening, replicas=local)
        finally:
            await local.close()


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


class LocalReplicas:
    """Replicas on this machine: each has one of the ``starts`` until it has ended."""

    def __init__(self, starts: Sequence[ReplicaStart]) -> None:
        self._starts, self._free = starts, list(range(len(starts)))
        self._running: dict[str, tuple[int, _Replica]] = {}

    async def start(self) -> str:
        """Start one on the first free part of the machine; returns its URL once it listens.

        Raises:
            EngineError: it ended before, or all parts are taken.
        """
        if not self._free:
            raise EngineError("No part of this machine is left for another replica.")
        number = heappop(self._free)
        replica = _Replica(msgspec.structs.replace(self._starts[number]))
        try:
            url = await replica.start()
        except BaseException:
            await replica.end()
            heappush(self._free, number)
            raise
        replica.keep()
        self._running[url] = number, replica
        return url

    async def end(self, url: str) -> None:
        """Let one drain, end it, and have its part of the machine back."""
        if (found := self._running.pop(url, None)) is not None:
            number, replica = found
            await replica.end()
            heappush(self._free, number)

    async def close(self) -> None:
        """End all."""
        await asyncio.gather(*map(self.end, tuple(self._running)))


class _Replica:
    """A server process, which is started again on its port when it ends."""

    def __init__(self, start: ReplicaStart) -> None:
        self._start = start
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start it; returns its URL once it listens.

        Raises:
            EngineError: it ended before.
        """
        command = [sys.executable, "-P", *["-O"] * sys.flags.optimize]
        command += ["-m", "ridgeline.fleet.replica_main", str(os.getpid())]
        pipe = asyncio.subprocess.PIPE
        # In a session of its own: Ctrl-C at a terminal does not reach it.
        self._process = process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        data = wire.encode(self._start)
        process.stdin.write(struct.pack("<I", len(data)) + data)
        line = (await process.stdout.readline()).decode().strip()
        if not line.startswith("http"):
            raise EngineError(line or "A replica's process ended as it started.")
        server = replace(self._start.server, port=int(line.rpartition(":")[2]))
        self._start.server = server  # from now on the same port
        return line

    def keep(self) -> None:
        """From now on start it again whenever it ends."""
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            assert self._process is not None
            code = await self._process.wait()
            _log.error("A replica has ended with code %d; it is started again.", code)
            await asyncio.sleep(wait_s)
            try:
                await self.start()
                wait_s = _FIRST_WAIT_S
            except (EngineError, OSError) as error:  # of the system: no memory, no files
                _log.error("A replica cannot be started: %s", error)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def end(self) -> None:
        """Let it drain, and end it if it does not."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._start.server.drain_s + _END_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
