"""Typed messages over a stream socket: four bytes of length, and msgpack."""

import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from ridgeline.core import wire

_LENGTH = struct.Struct("<I")
_LEAST_S = 0.001  # a limit of zero would mean: do not wait, and another error
_MOST_BYTES = 1 << 30  # of a message: KV of several blocks
Received = TypeVar("Received")


class Channel(Generic[Received]):
    """One end. Any thread may send; one receives.

    Args:
        stream: connected, and the channel's from now on.
        received: the type of what comes; of another nothing is accepted.
    """

    def __init__(self, stream: socket.socket, received: Any) -> None:
        self._stream = stream
        self._encoder = msgspec.msgpack.Encoder(enc_hook=wire.encode_hook)
        self._decoder = msgspec.msgpack.Decoder(received, dec_hook=wire.decode_hook)
        self._sending = threading.Lock()

    def encoded(self, message: object) -> bytes:
        """What `send_encoded` takes, so that a message to several is encoded once."""
        data = self._encoder.encode(message)
        return _LENGTH.pack(len(data)) + data

    def send(self, message: object, *, until_s: float | None = None) -> None:
        """Raises ``OSError`` if the other end is gone, or does not take it by ``until_s`` of
        ``time.monotonic()``; whoever gives times has the channel for itself.
        """
        if until_s is not None:
            self._set_limit(until_s)
        self.send_encoded(self.encoded(message))

    def send_encoded(self, data: bytes) -> None:
        """Raises ``OSError`` if the other end is gone."""
        with self._sending:
            self._stream.sendall(data)

    def receive(
        self, *, until_s: float | None = None, most_bytes: int = _MOST_BYTES
    ) -> Received | None:
        """The next message; ``None`` when the other end is gone, or the message is not whole by
        ``until_s`` of ``time.monotonic()``.

        Raises:
            msgspec.DecodeError: it is no message of the type, or too large.
        """
        head = self._read(_LENGTH.size, until_s)
        size = _LENGTH.unpack(head)[0] if head else 0
        if size > most_bytes:
            raise msgspec.DecodeError(f"a message of {size} bytes is too large")
        data = head and self._read(size, until_s)
        if not data:
            return None
        message: Received = self._decoder.decode(data)
        return message

    def close(self) -> None:
        """End it; who receives at this end or the other gets ``None``."""
        with suppress(OSError):  # the other end was first
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    def _set_limit(self, until_s: float) -> None:
        self._stream.settimeout(max(_LEAST_S, until_s - time.monotonic()))

    def _read(self, size: int, until_s: float | None) -> bytes | None:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            try:
                if until_s is not None:  # once it is over, only what is here
                    self._stream.settimeout(max(0.0, until_s - time.monotonic()))
                count = self._stream.recv_into(view[done:])
            except OSError:
                return None
            if count == 0:
                return None
            done += count
        return bytes(data)
