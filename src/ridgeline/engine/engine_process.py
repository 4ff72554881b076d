"""One life of the engine's process, seen from the front."""

import asyncio
import contextlib
import logging
import os
import stat
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import zmq

from ridgeline.core import wire
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineUnavailableError
from ridgeline.core.private_folder import PrivateFolder
from ridgeline.engine.messages import Abort, Add, Command, Event, Pulse, Started

_MAX_MESSAGES = 256  # taken in one turn of the event loop
_SEND_HWM = 16_384


class EngineProcess:
    """Starts the process, carries commands and events, and keeps the latest pulse.

    Its sockets lie in a private folder, which is removed as soon as both ends are connected: from
    then on nothing is left in the file system, however the two processes end.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._folder = PrivateFolder()
        self._events = self._bind("events")
        self._pulses = self._bind("pulses")
        self._event_decoder = msgspec.msgpack.Decoder(Event, dec_hook=wire.decode_hook)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=wire.encode_hook)
        self._unsent: list[Abort] = []
        self._process: asyncio.subprocess.Process | None = None
        self._loop = asyncio.get_running_loop()
        self._descriptors: list[int] = []
        self._is_closed = False
        self.last_pulse_s = time.monotonic()
        self.pulse = Pulse(step_id=0, is_busy=True, cpu_s=0.0)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def cpu_s(self) -> float:
        """Processor time that it has spent, by the system's account; 0 if it is gone."""
        with contextlib.suppress(psutil.Error):
            return float(sum(psutil.Process(self.pid).cpu_times()[:2]))
        return 0.0

    async def start(self, config: EngineConfig) -> None:
        """Start it; `Started` or `Failed` follows among the events."""
        for socket, read in ((self._events, self._read_events), (self._pulses, self._read_pulses)):
            descriptor = int(socket.get(zmq.FD))
            self._descriptors.append(descriptor)
            self._loop.add_reader(descriptor, read)
        command = [sys.executable, "-P", *["-O"] * sys.flags.optimize]
        level = logging.getLogger("ridgeline").getEffectiveLevel()
        command += ["-m", "ridgeline.engine.process_main", str(self._folder.path), str(os.getpid())]
        command.append(str(level))
        try:
            # In a session of its own: Ctrl-C at a terminal does not reach it, even as it starts.
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
            )
        except BaseException:
            self._close()
            raise
        assert self._process.stdin is not None
        data = wire.encode(config)
        self._process.stdin.write(struct.pack("<I", len(data)) + data)

    def send(self, command: Command) -> None:
        """Send a command, without waiting; nothing happens if the process has ended.

        Raises:
            EngineUnavailableError: too many commands wait already; aborts are kept nevertheless.
        """
        if self._is_closed:
            return
        try:
            while self._unsent:
                self._events.send(self._encoder.encode(self._unsent[-1]), zmq.NOBLOCK)
                self._unsent.pop()
            self._events.send(self._encoder.encode(command), zmq.NOBLOCK)
        except zmq.Again:
            if isinstance(command, Abort):
                self._unsent.append(command)
            elif isinstance(command, Add):
                raise EngineUnavailableError("The engine does not take requests now.") from None
        self._loop.call_soon(self._read_events)  # sending may swallow the wake-up of a receipt

    async def wait(self) -> int:
        """Wait for its end; what it sent before has then been handled. Returns the exit code."""
        assert self._process is not None
        code = await self._process.wait()
        self._read_events(limit=sys.maxsize)
        self._close()
        return code

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _bind(self, name: str) -> "zmq.Socket[bytes]":
        # The context of this whole process: one of its own, if nobody closed it, would wait for its
        # sockets for ever when it is collected.
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        socket.set(zmq.SNDHWM, _SEND_HWM)
        socket.set(zmq.LINGER, 0)
        path = self._folder.path / name
        socket.bind(f"ipc://{path}")
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        return socket

    def _read_events(self, limit: int = _MAX_MESSAGES) -> None:
        for _ in range(limit):
            data = self._receive(self._events)
            if data is None:
                return
            event = self._event_decoder.decode(data)
            if isinstance(event, Started):
                self._folder.remove()
            self._on_event(event)
        self._loop.call_soon(self._read_events)

    def _read_pulses(self) -> None:
        while (data := self._receive(self._pulses)) is not None:
            self.pulse = wire.decode(data, Pulse)
            self.last_pulse_s = time.monotonic()

    def _receive(self, socket: "zmq.Socket[Any]") -> bytes | None:
        if self._is_closed:
            return None
        try:
            return bytes(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def _close(self) -> None:
        self._is_closed = True
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._events.close()
        self._pulses.close()
        self._folder.remove()
