"""A replica: an engine of one model as a server's process, and how it is started again."""

import asyncio
import contextlib
import logging
import os
import struct
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec

from ridgeline.core import wire
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineError, SettingsError
from ridgeline.server.config import ServerConfig

_log = logging.getLogger(__name__)
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_END_S = 5.0  # more than they take to drain

Moved = Callable[[str, str], Awaitable[None]]  # is told a replica's old URL and its new one


class ReplicaStart(msgspec.Struct):
    """What a replica's process is told: settings, and the processors that it may use; all that it
    has, if there are none."""

    engine: EngineConfig
    server: ServerConfig
    processors: tuple[int, ...] = ()


class ReplicaProcess:
    """A server process, which is started again when it ends: on its port, if it ``keeps_port``."""

    module = "ridgeline.fleet.replica_main"  # which gets `message`
    keeps_port = True

    def __init__(self, settings: ReplicaStart) -> None:
        self.settings = settings
        self.url = ""
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start it; returns its URL once it listens.

        Raises:
            EngineError: it ended before, or said something else.
        """
        command = [sys.executable, "-P", *["-O"] * sys.flags.optimize]
        command += ["-m", self.module, str(os.getpid())]
        pipe = asyncio.subprocess.PIPE
        # In a session of its own: Ctrl-C at a terminal does not reach it.
        self._process = process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        data = wire.encode(self.message())
        process.stdin.write(struct.pack("<I", len(data)) + data)
        line = (await process.stdout.readline()).decode().strip()
        if not line.startswith("http"):
            error = EngineError(line or "A replica's process ended as it started.")
            if await _ended(process, _END_S) == SettingsError.exit_code:
                error.exit_code = SettingsError.exit_code
            raise error
        if self.keeps_port:
            port = int(line.rpartition(":")[2])
            self.settings.server = replace(self.settings.server, port=port)
        self.url = line
        return line

    def message(self) -> object:
        """What its process is told."""
        return self.settings

    async def wait(self) -> int:
        """Until it ends; with which code."""
        assert self._process is not None
        return await self._process.wait()

    def keep(self, moved: Moved) -> None:
        """From now on start it again whenever it ends."""
        self._keeping = asyncio.create_task(self._keep(moved))

    async def _keep(self, moved: Moved) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            code, before = await self.wait(), self.url
            _log.error("A replica has ended with code %d; it is started again.", code)
            await asyncio.sleep(wait_s)
            try:
                await self.start()
                wait_s = _FIRST_WAIT_S
            except (EngineError, OSError) as error:  # of the system: no memory, no files
                _log.error("A replica cannot be started: %s", error)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                continue
            if self.url != before:
                await moved(before, self.url)

    async def end(self) -> None:
        """Let it drain, and end it if it does not."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        await _ended(process, self.settings.server.drain_s + _END_S)


async def _ended(process: asyncio.subprocess.Process, within_s: float) -> int:
    """The code that it ends with; it is killed if it has not by then."""
    try:
        return await asyncio.wait_for(process.wait(), within_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
