"""`serve`: the engine, the application and the socket, from start to a clean end."""

import asyncio
import gc
import logging
import math
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ridgeline.core.config import EngineConfig
from ridgeline.core.encryption import read_key
from ridgeline.core.errors import EngineError, MachineError, NoTokenError, SettingsError
from ridgeline.core.settings.kv import SHARED_TIERS
from ridgeline.core.settings.reading import changed_settings
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.engine.guard.word_list import WordList
from ridgeline.engine.loading import Progress
from ridgeline.engine.stats import EngineStatus
from ridgeline.server.app import build_app
from ridgeline.server.config import ServerConfig
from ridgeline.server.context import Server
from ridgeline.server.continuation import router_token
from ridgeline.server.first_request import run_first_request
from ridgeline.server.http import http_protocol
from ridgeline.server.jobs.folder import open_data_folder, open_existing_folder
from ridgeline.server.jobs.jobs import Jobs
from ridgeline.server.jobs.quotas import Quotas
from ridgeline.server.jobs.upload import MAX_UPLOAD_BYTES
from ridgeline.server.jobs.worker import BatchWorker
from ridgeline.server.keys import KeyRing
from ridgeline.server.logs import log_request, setup_request_log
from ridgeline.server.membership import Memberships
from ridgeline.server.pool.pool import ModelPool, PoolPlan

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_CLOSE_S = 2.0  # after the drain, for connections that are still open
_LOOK_EVERY_S = 0.5  # whether there still is an engine
Announce = Callable[[str], None]


def serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    *,
    pool: PoolPlan | None = None,
    progress: Progress | None = None,
    announce: Announce = print,
    on_listening: Callable[[str], object] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then let what is in progress end.

    With a ``pool`` there are several models, and ``engine_config`` has the settings of all.
    ``announce`` is called with lines for the person who started it, ``on_listening`` once with the
    URL.

    Raises:
        EngineError: the engine was lost, and could not be started again.
        RidgelineError: the model cannot be loaded, a setting is wrong, or the port or the data
            folder is taken.
    """
    if sys.platform == "win32":
        asyncio.run(_serve(engine_config, config, pool, progress, announce, on_listening))
        return
    run_to_end(_serve(engine_config, config, pool, progress, announce, on_listening))


def run_to_end(main: Coroutine[Any, Any, None]) -> None:
    """Run what serves. SIGTERM before it has a handler of its own ends it in order as well: what
    was begun is taken back, and the exit code is that of the signal."""
    import uvloop

    async def cancellable() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await main

    try:
        uvloop.run(cancellable())
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


async def _serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    plan: PoolPlan | None,
    progress: Progress | None,
    announce: Announce,
    on_listening: Callable[[str], object] | None,
) -> None:
    # A taken port or data folder and files that are no such are found before the model is loaded.
    KeyRing(config).check_policy(engine_config.scheduling_policy)
    check_certificate(config)
    if config.router_key_file is not None:
        read_key(Path(config.router_key_file))
    if config.guard_list is not None:
        WordList.read(config.guard_list)
    is_shared = any(getattr(engine_config, name) for name in SHARED_TIERS)
    if is_shared and engine_config.encryption_key_file != config.encryption_key_file:
        raise SettingsError("encryption_key_file must be that of the data folder in both settings.")
    with open_listener(config) as listener, ExitStack() as opened:
        port = listener.getsockname()[1]
        if (database := open_existing_folder(config, port)) is not None:
            opened.enter_context(closing(database))
        engines = (
            AsyncEngine(engine_config, progress=progress)
            if plan is None
            else ModelPool(plan.config)
        )
        encoder: AsyncEngine | None = None

        def jobs() -> Jobs:
            folder = database or opened.enter_context(closing(open_data_folder(config, port)))
            return Jobs(folder, Quotas.of(config))

        try:
            if isinstance(engines, AsyncEngine):
                await engines.start()
                encoder = await _start_encoder(config)
                settings = changed_settings(engine_config)
                server = Server(engines, config, jobs(), settings, encoder)
            else:
                assert plan is not None
                await engines.start(plan.models, progress=progress)
                server = Server.of_pool(engines, config, jobs())
            if server.guard is not None:
                await server.guard.start()
            if config.log_requests:
                setup_request_log()
            await run(server, listener, announce, on_listening)
        finally:
            await engines.shutdown()
            if encoder is not None:
                await encoder.shutdown()


async def _start_encoder(config: ServerConfig) -> AsyncEngine | None:
    """The engine that makes the vectors of questions, where it is another model."""
    if config.semantic_cache_encoder is None:
        return None
    encoder = AsyncEngine(EngineConfig(model=config.semantic_cache_encoder))
    await encoder.start()
    return encoder


async def run(
    server: Server,
    listener: socket.socket,
    announce: Announce,
    on_listening: Callable[[str], object] | None = None,
) -> None:
    """Serve on an open socket, with an engine that has started.

    Raises:
        EngineError: the engine was lost; a supervisor may start another server.
    """
    http = http_server(server)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    url = url_of(listener, server.config)
    names = ", ".join(view.model_name for view in server.views)
    announce(f"Ridgeline serves {names} on {url}")
    for line in _summary(server):
        announce(line)
    if on_listening is not None:
        on_listening(url)
    for note in start_notes(server):
        announce(note)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    working = asyncio.create_task(BatchWorker(server).run())
    purging = asyncio.create_task(server.jobs.responses.keep_purging())
    warming = asyncio.create_task(_become_ready(server, announce))
    token = None if server.router_key is None else router_token(server.router_key)
    members = Memberships(server.config, listener.getsockname()[1], token, announce)
    stopped = asyncio.create_task(stopping.wait())
    lost = asyncio.create_task(_lost(server))
    await asyncio.wait((serving, stopped, lost), return_when=asyncio.FIRST_COMPLETED)
    warming.cancel()
    working.cancel()
    purging.cancel()
    members.leave()
    await _drain(server, announce, stopping)
    server.end_requests()
    await members.left()
    http.should_exit = True
    await serving
    await asyncio.gather(working, purging, return_exceptions=True)
    server.close()
    if lost.done():
        raise EngineError(lost.result())
    lost.cancel()


def _summary(server: Server) -> list[str]:
    if server.pool is None:
        return [server.engine.summary.line]
    budget = server.pool.config.budget_bytes
    lines = [f"Models are loaded as they are asked for, into {budget / 2**30:.2f} GiB."]
    for model in server.pool.models:
        needed = model.tenancy.num_bytes
        note = "which never fits" if needed > budget else f"about {model.tenancy.load_s:.1f} s"
        lines.append(f"{model.name}: {needed / 2**30:.2f} GiB, {note}")
    return lines


class Listens(Protocol):
    """Where a server listens, and the files of its certificate."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def ssl_keyfile(self) -> str | None: ...
    @property
    def ssl_certfile(self) -> str | None: ...


def url_of(listener: socket.socket, config: Listens) -> str:
    """Where clients find what listens there."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{shown}:{port}"


def check_certificate(config: Listens) -> None:
    """Raise SettingsError for files of HTTPS that cannot be used."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.ssl_certfile,
            config.ssl_keyfile,
            password=lambda: "",  # rather than asking on the terminal
        )
    except OSError as error:  # of which the errors of ssl are some
        raise SettingsError(
            f"{config.ssl_certfile} and {config.ssl_keyfile} cannot be used for HTTPS: {error}."
        ) from error


def start_notes(server: Server) -> list[str]:
    """What whoever starts a server should know of it."""
    notes = []
    if server.keys.is_open:
        notes.append("No keys are set, so only programs on this machine can call (see --api-key).")
    if (
        server.pool is None
        and server.config.tool_call_parser == "auto"
        and server.tool_parser is None
    ):
        notes.append(
            "The form of this chat template's tool calls is not known: they stay in the text, and "
            "forced ones are plain JSON (see --tool-call-parser)."
        )
    return notes


async def _lost(server: Server) -> str:
    """Wait until the engine is given up; returns why."""
    while (health := server.monitored.health()).status is not EngineStatus.DEAD:
        await asyncio.sleep(_LOOK_EVERY_S)
    return health.reason or "The engine has ended."


def http_server(server: Server) -> uvicorn.Server:
    """The HTTP side, to be run on sockets by its ``serve``."""
    protocol = http_protocol(
        part_timeout_s=server.config.body_timeout_s,
        stall_timeout_s=server.config.stall_timeout_s,
        max_body_bytes=max(server.config.max_body_mib << 20, MAX_UPLOAD_BYTES) + (1 << 20),
        refused=partial(_count_refusal, server),
    )
    return http_side(build_app(server), server.config, protocol)


def http_side(app: ASGIApp, config: Listens, protocol: type[HttpToolsProtocol]) -> uvicorn.Server:
    """An application over a protocol, to be run on sockets by its ``serve``."""
    return _HttpServer(
        uvicorn.Config(
            app,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            http=protocol,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=math.ceil(_CLOSE_S) + 1,
        )
    )


def _count_refusal(server: Server, request_id: str, status: int) -> None:
    """Count and log what was no request.

    A request whose body stops being HTTP, or stops, counts twice: here, and by the line of its
    route, which had begun to read it.
    """
    server.metrics.http("refused", "other", status)
    if server.config.log_requests:
        log_request("", None, request_id, status, 0.0)


async def _drain(server: Server, announce: Announce, stopping: asyncio.Event) -> None:
    """Refuse new work and wait for what is in progress; a second signal ends the wait."""
    server.is_draining = True
    stopping.clear()
    running = server.limits.running
    if running:
        announce(f"Waiting up to {server.config.drain_s:g} s for {running} requests to end.")
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + server.config.drain_s
    while server.limits.running and loop.time() < deadline_s and not stopping.is_set():
        await asyncio.sleep(0.02)


async def _become_ready(server: Server, announce: Announce) -> None:
    if server.pool is None:
        await warm_up(server, announce)
    else:
        announce("Ready.")
    gc.collect()
    gc.freeze()  # a full collection would look at everything imported, between two tokens


async def warm_up(server: Server, announce: Announce) -> None:
    """Run one request, so that the first caller does not pay for caches and lazy imports.

    A model that gives it no token leaves the server not ready.
    """
    try:
        await run_first_request(server.engine)
        if server.engine.chat_template is not None:
            await server.in_thread(
                lambda: server.chat_template.render([{"role": "user", "content": "Hello"}])
            )
    except NoTokenError as error:
        server.first_request = str(error)
        _log.error("The first request failed: %s", error)
        announce("Not ready: the first request failed.")
        return
    except Exception as error:  # the server says through /ready what is wrong
        _log.warning("The first request failed: %s", error)
    server.is_warm = True
    announce("Ready.")


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers, which would end streams that are in progress.

    Who does not take the end of an answer is left before uvicorn would cancel the answer's task.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(_CLOSE_S, self._abort_connections)
        await super().shutdown(sockets)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def open_listener(config: Listens) -> socket.socket:
    """An open, listening socket.

    Raises:
        MachineError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio sends small writes at once only on sockets whose protocol is spelt out.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host.strip("[]"), config.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise MachineError(
            f"Port {config.port} of {config.host} cannot be used: {error.strerror or error}."
        ) from error
    listener.setblocking(False)
    return listener
