"""Sockets between the stages of a pipeline: hidden states to the next, outcomes from the last."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Literal

import msgspec
import numpy as np

from ridgeline.core.arrays import Array, numpy_dtype
from ridgeline.core.errors import EngineError
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.executors.pipeline import Outcome

_LENGTH = struct.Struct("<Q")
_OUTCOMES = msgspec.msgpack.Decoder(list[Outcome])
_MOST_BYTES = 1 << 33  # of a message: hidden states of a step
_ROUNDS = 20  # of a measurement


class Wires(msgspec.Struct, frozen=True):
    """Descriptors of one rank's sockets, which it inherits: of hidden states from the stage before
    and to the next one, of outcomes from the last stage, or of the last stage to all others."""

    rows_in: int | None = None
    rows_out: int | None = None
    outcomes_in: int | None = None
    outcomes_out: tuple[int, ...] = ()

    @property
    def descriptors(self) -> tuple[int, ...]:
        ends = (self.rows_in, self.rows_out, self.outcomes_in, *self.outcomes_out)
        return tuple(end for end in ends if end is not None)

    def joined(self, kind: str, end: int, *, is_first: bool) -> "Wires":
        """These and one end of an `Edge`."""
        match kind, is_first:
            case "rows", True:
                return msgspec.structs.replace(self, rows_out=end)
            case "rows", False:
                return msgspec.structs.replace(self, rows_in=end)
            case "outcomes", True:
                return msgspec.structs.replace(self, outcomes_out=(*self.outcomes_out, end))
            case _:
                return msgspec.structs.replace(self, outcomes_in=end)


class Edge(msgspec.Struct, frozen=True):
    """A connection of two ranks: of hidden states to the next stage (``rows``) or of what came of
    a pass (``outcomes``), from the first to the second."""

    kind: Literal["rows", "outcomes"]
    first: int
    second: int


def edges(layout: ParallelLayout) -> list[Edge]:
    """Which ranks of a layout are connected by sockets.

    A rank has its hidden states from the rank of the stage before that has the same part of its
    matrices. The first rank of the last stage tells outcomes.
    """
    width = layout.stage_ranks
    teller = layout.num_ranks - width
    return [
        edge
        for rank in range(teller)
        for edge in (Edge("rows", rank, rank + width), Edge("outcomes", teller, rank))
    ]


def wire(
    layout: ParallelLayout, ends: Callable[[Edge], tuple[int | None, int | None]] | None = None
) -> list[Wires]:
    """The ends of each rank's sockets, which the caller closes.

    ``ends`` are the descriptors of an edge for its first and its second rank, ``None`` for one on
    another machine; those of a socket pair, if it is left out.
    """
    wires = [Wires() for _ in range(layout.num_ranks)]
    for edge in edges(layout):
        first, second = (ends or _pair)(edge)
        if first is not None:
            wires[edge.first] = wires[edge.first].joined(edge.kind, first, is_first=True)
        if second is not None:
            wires[edge.second] = wires[edge.second].joined(edge.kind, second, is_first=False)
    return wires


def _pair(_: Edge) -> tuple[int, int]:
    ends = socket.socketpair()
    return ends[0].detach(), ends[1].detach()


class SocketPipe:
    """See `ridgeline.executors.pipeline.StagePipe`.

    What comes is read at once, in a thread, and kept until it is asked for: whoever sends does not
    wait for a stage that is busy. ``waited_s`` is how long was waited for what did not come yet.
    """

    def __init__(self, wires: Wires, layout: ParallelLayout) -> None:
        self.num_stages = layout.pipeline
        self.is_last = wires.rows_out is None
        self._rows_in = _Inbox(wires.rows_in)
        self._outcomes_in = _Inbox(wires.outcomes_in)
        self._rows_out = _outlet(wires.rows_out)
        self._outcomes_out = [_outlet(end) for end in wires.outcomes_out]
        self.waited_s = 0.0
        self.sent_bytes = self.num_sent = 0

    def send(self, rows: Array) -> None:
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        self.sent_bytes += len(data)
        self.num_sent += 1
        _send(self._rows_out, data)

    def receive(self, shape: tuple[int, int], dtype: str) -> Array:
        kind = numpy_dtype(dtype)
        data = self._next(self._rows_in)
        if len(data) != shape[0] * shape[1] * kind.itemsize:
            raise EngineError("The stages of a pipeline are not at the same pass.")
        return np.frombuffer(data, dtype=kind).reshape(shape)

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        data = memoryview(msgspec.msgpack.encode(outcomes))
        for end in self._outcomes_out:
            _send(end, data)

    def hear(self) -> list[Outcome]:
        return _OUTCOMES.decode(self._next(self._outcomes_in))

    def exchange_seconds(self, num_bytes: int) -> float:
        """What so many bytes of hidden states take from one stage to the next, by the clock of the
        first; all ranks measure together."""
        rows = np.zeros((1, num_bytes), dtype=np.uint8)
        sent_bytes, num_sent, seconds = self.sent_bytes, self.num_sent, []
        for _ in range(_ROUNDS):
            begin_s = time.perf_counter()
            if self._rows_in.exists:
                self.receive((1, num_bytes), "uint8")
            if self.is_last:
                self.tell([])
            else:
                self.send(rows)
                self.hear()
            seconds.append(time.perf_counter() - begin_s)
        self.sent_bytes, self.num_sent, self.waited_s = sent_bytes, num_sent, 0.0
        return float(np.quantile(seconds, 0.25)) / (self.num_stages - 1)

    def _next(self, inbox: "_Inbox") -> bytearray:
        begin_s = time.perf_counter()
        data = inbox.messages.get()
        self.waited_s += time.perf_counter() - begin_s
        return data


class _Inbox:
    """What comes over a socket, as soon as it does. If its other end is gone nothing comes any
    more: whoever started the ranks ends them all."""

    def __init__(self, descriptor: int | None) -> None:
        self.exists = descriptor is not None
        self.messages: SimpleQueue[bytearray] = SimpleQueue()
        if descriptor is not None:
            stream = socket.socket(fileno=descriptor)
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: socket.socket) -> None:
        with stream, suppress(OSError):
            while head := _exactly(stream, _LENGTH.size):
                size = _LENGTH.unpack(head)[0]
                data = _exactly(stream, size) if size <= _MOST_BYTES else None
                if data is None:
                    return
                self.messages.put(data)


def _exactly(stream: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = stream.recv_into(view[done:])
        if count == 0:
            return None
        done += count
    return data


def _outlet(descriptor: int | None) -> socket.socket | None:
    return None if descriptor is None else socket.socket(fileno=descriptor)


def _send(end: socket.socket | None, data: memoryview) -> None:
    assert end is not None, "a stage that has nobody to send to"
    try:
        end.sendall(_LENGTH.pack(len(data)))
        end.sendall(data)
    except OSError:  # as with what does not come
        threading.Event().wait()
