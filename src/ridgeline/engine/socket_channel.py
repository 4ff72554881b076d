"""The worker's end of the Unix socket to the front, and what waits to be sent over it."""

import time
from collections.abc import Sequence

import msgspec
import zmq

from ridgeline.core import wire
from ridgeline.engine.messages import Command, Event, Output, Report
from ridgeline.engine.stream_buffer import ChunkBuffer

_MAX_COMMANDS = 1024  # taken between two steps
_SEND_HWM = 64  # messages; beyond it chunks are merged here
_LAST_WORDS_S = 2.0


class SocketChannel:
    """Receives commands and sends events; used by the worker's thread alone.

    Sending never blocks: when the front does not keep up, chunks are merged for each request, of
    reports the latest is kept, and the rest waits in order (its number is bounded by the requests).
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, _SEND_HWM)
        self._socket.set(zmq.LINGER, int(_LAST_WORDS_S * 1000))
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(Command, dec_hook=wire.decode_hook)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=wire.encode_hook)
        self._buffers: dict[int, ChunkBuffer] = {}  # by request
        self._events: list[Event] = []
        self._report: Report | None = None

    @property
    def is_behind(self) -> bool:
        return bool(self._buffers or self._events or self._report)

    def receive(self, *, wait_s: float) -> Sequence[Command]:
        deadline_s = time.monotonic() + wait_s
        while True:
            self._flush()
            commands = self._take()
            left_s = deadline_s - time.monotonic()
            if commands or left_s <= 0:
                return commands
            events = zmq.POLLIN | (zmq.POLLOUT if self.is_behind else 0)
            self._socket.poll(int(left_s * 1000) + 1, events)

    def send(self, event: Event) -> None:
        self._flush()
        if self.is_behind or not self._try(event):
            self._keep(event)

    def last_words(self, event: Event) -> None:
        """Send what is left and then ``event``, for a short while; nothing is sent after it."""
        self._keep(event)
        deadline_s = time.monotonic() + _LAST_WORDS_S
        while self.is_behind and time.monotonic() < deadline_s:
            self._flush()
            time.sleep(0.01)

    def close(self) -> None:
        self._socket.close()

    def _take(self) -> list[Command]:
        commands: list[Command] = []
        while len(commands) < _MAX_COMMANDS:
            try:
                commands.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return commands

    def _try(self, event: Event) -> bool:
        try:
            self._socket.send(self._encoder.encode(event), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _keep(self, event: Event) -> None:
        match event:
            case Output(chunks=chunks):
                for chunk in chunks:
                    self._buffers.setdefault(chunk.request_id, ChunkBuffer()).put(chunk)
            case Report():
                self._report = event
            case _:
                self._events.append(event)

    def _flush(self) -> None:
        """Send what waits, chunks first, as far as the socket takes it."""
        while self._buffers:
            number = next(iter(self._buffers))
            if not self._socket.poll(0, zmq.POLLOUT):
                return
            self._try(Output(chunks=list(self._buffers.pop(number).drain())))
        while self._events and self._try(self._events[0]):
            del self._events[0]
        if self._report and not self._events and self._try(self._report):
            self._report = None
