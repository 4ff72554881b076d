"""`route`: a router and its socket, from start to a clean end."""

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import closing

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ridgeline.fleet.app import RouterApp
from ridgeline.fleet.autoscaler import Autoscaler
from ridgeline.fleet.cascade import Cascade
from ridgeline.fleet.config import RouterConfig
from ridgeline.fleet.control import FleetControl, Replicas
from ridgeline.fleet.request_log import RequestLog
from ridgeline.fleet.router import Router
from ridgeline.server.http import http_protocol
from ridgeline.server.serving import (
    Announce,
    check_certificate,
    http_side,
    open_listener,
    run_to_end,
    url_of,
)

_POLL_S = 0.02


def route(
    config: RouterConfig,
    *,
    announce: Announce = print,
    on_listening: Callable[[str], object] | None = None,
) -> None:
    """Route until SIGTERM or SIGINT, then let what is in progress end.

    Raises:
        RidgelineError: a setting is wrong, or the port is taken.
    """
    check_certificate(config)
    router = Router(config)

    async def main() -> None:
        with closing(open_listener(config)) as listener:
            await run(router, listener, announce, on_listening)

    run_to_end(main())


async def run(
    router: Router,
    listener: socket.socket,
    announce: Announce = print,
    on_listening: Callable[[str], object] | None = None,
    stopping: asyncio.Event | None = None,
    replicas: Replicas | None = None,
) -> None:
    """Route on an open socket until ``stopping`` is set, or a signal comes if there is none.

    ``replicas`` starts and ends engines while it does.
    """
    config, loop = router.config, asyncio.get_running_loop()
    if stopping is None:
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
    log = None
    if config.request_log is not None:
        log = RequestLog(config.request_log, with_text=config.request_log_text)
    cascade = Cascade(config, router) if config.cascade else None
    routers = [router, *([cascade.router] if cascade is not None else [])]
    for each in routers:
        await each.start()
    control = FleetControl(router, replicas, start_s=config.start_s)
    goal = config.scaling_goal
    scaler = None if goal is None else Autoscaler(control, goal, say=announce)
    if scaler is not None:
        router.watch(scaler.collect)
        control.spawn(scaler.run())
    app = RouterApp(control, scaler, log=log, cascade=cascade)
    http = http_side(app, config, _protocol(config))
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    url = url_of(listener, config)
    announce(f"Ridgeline routes to {len(router.engines)} engines on {url}")
    for note in dict.fromkeys(note for each in routers for note in _notes(each)):
        announce(note)
    control.spawn(_become_ready(router, announce))
    if on_listening is not None:
        on_listening(url)
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
    router.is_draining = True
    await control.close()
    deadline_s = loop.time() + config.drain_s
    while router.num_open and loop.time() < deadline_s:
        await asyncio.sleep(_POLL_S)
    http.should_exit = True
    await serving
    stopped.cancel()
    for each in routers:
        await each.close()


async def _become_ready(router: Router, announce: Announce) -> None:
    while not router.num_up:
        await asyncio.sleep(_POLL_S)
    announce("Ready.")


def _notes(router: Router) -> list[str]:
    notes = [f"{each.pool.url}: {each.reason}" for each in router.engines if not each.is_up]
    if router.token is None:
        notes.append(
            "No key is shared with the engines: streams end with theirs (see --router-key-file)."
        )
    return notes


def _protocol(config: RouterConfig) -> type[HttpToolsProtocol]:
    """The server's protocol, whose connections the application may write to."""
    bounded = http_protocol(
        part_timeout_s=config.body_timeout_s,
        stall_timeout_s=config.stall_timeout_s,
        max_body_bytes=(config.max_body_mib << 20) + (1 << 20),
        refused=lambda *_: None,
        descriptors_each=2,  # one to the engine
    )

    class RouterProtocol(bounded):  # type: ignore[misc, valid-type]
        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["extensions"] = {"ridgeline.connection": (self.transport, self.flow)}

    return RouterProtocol
