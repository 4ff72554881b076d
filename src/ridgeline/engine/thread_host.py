"""The worker in a thread of this process."""

import asyncio
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import RidgelineError
from ridgeline.engine.engine import Engine
from ridgeline.engine.info import EngineInfo
from ridgeline.engine.loading import Progress
from ridgeline.engine.messages import Command, Event, Failed, Started, Stop
from ridgeline.engine.stats import EngineStatus, Health
from ridgeline.engine.worker import Worker

_log = logging.getLogger(__name__)

_JOIN_S = 30.0


class ThreadHost:
    """Runs a `Worker` in a thread, and gives its events to the event loop that started it."""

    def __init__(self, config: EngineConfig, progress: Progress | None) -> None:
        self._config = config
        self._progress = progress
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._info: EngineInfo | None = None
        self.num_restarts = 0
        self.health = Health(status=EngineStatus.STARTING, reason="The model is not loaded yet.")

    @property
    def pid(self) -> int | None:
        return os.getpid()

    async def start(self, on_event: Callable[[Event], None]) -> None:
        loop = asyncio.get_running_loop()

        def take(event: Event) -> None:
            match event:
                case Started():
                    self.health = Health(status=EngineStatus.READY)
                case Failed(message=message):
                    self.health = Health(status=EngineStatus.DEAD, reason=message)
            on_event(event)

        def send(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed
                loop.call_soon_threadsafe(take, event)

        self._thread = threading.Thread(
            target=self._run, args=(send,), name="ridgeline-engine", daemon=True
        )
        self._thread.start()

    def info(self) -> EngineInfo:
        """What was loaded; to be called once the worker has `Started`."""
        assert self._info is not None
        return self._info

    def send(self, command: Command) -> None:
        self._commands.put(command)

    async def stop(self) -> None:
        self.health = Health(status=EngineStatus.DEAD, reason="The engine has been shut down.")
        self.send(Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_S)

    def receive(self, *, wait_s: float) -> Sequence[Command]:
        commands = []
        try:
            commands.append(self._commands.get(block=wait_s > 0, timeout=wait_s or None))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _run(self, send: Callable[[Event], None]) -> None:
        try:
            engine = Engine(self._config, progress=self._progress)
        except RidgelineError as error:
            send(Failed(error=type(error).__name__, message=str(error)))
            return
        except Exception as error:  # whoever waits for the start must hear of it
            send(Failed(error="EngineError", message=f"The model cannot be loaded: {error!r}"))
            return
        self._info = engine.info
        try:
            failure = Worker(engine, receive=self.receive, send=send).run()
        except Exception as error:  # it could not be closed either
            _log.exception("The engine failed.")
            failure = Failed(error="EngineError", message=f"The engine failed: {error!r}")
        if failure is not None:
            send(failure)
