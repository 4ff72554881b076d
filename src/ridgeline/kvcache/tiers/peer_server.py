"""Gives the KV entries of one engine to others."""

import logging
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Protocol

import msgspec

from ridgeline.core.channel import Channel
from ridgeline.core.doors import Address, Door
from ridgeline.core.encryption import Encryption
from ridgeline.core.errors import NetworkError
from ridgeline.kvcache.tiers.coming import ComingEntries
from ridgeline.kvcache.tiers.entry import Entry, content_name, encode_entry
from ridgeline.kvcache.tiers.peer_messages import (
    MOST_KEYS,
    MOST_REPLY_BYTES,
    PURPOSE,
    AskEntries,
    AskSizes,
    Entries,
    EntrySizes,
    Hello,
    Question,
)

_log = logging.getLogger(__name__)

_MOST_CALLERS = 64
_FIRST_WORD_S = 5.0
_TAKE_S = 10.0  # in which a caller takes an answer
_MOST_QUESTION_BYTES = 64 * MOST_KEYS
_FOREVER_S = 1e6
_COMING_S = 0.2  # for the entries of a question that are being written
# A caller whose machine is gone is found out after a minute; one that is only silent may stay.
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class Lender(Protocol):
    """What entries are given out of. ``entry_bytes``: of one, about; 0 before there was any."""

    entry_bytes: int

    def peek(self, key: bytes) -> Entry | None:
        """An entry, asked for from any thread; ``None`` if it is not there."""


class PeerServer:
    """Listens for engines that have the same key and compute the same KV (``digest``).

    Each has a thread here, which reads entries out of memory: no step and no transfer of this
    engine waits for it. What is ``coming`` is there for whoever asks, who waits for it, for a fifth
    of a second. Beyond 64 engines, the one that came first is disconnected. With
    ``encryption`` entries are sent encrypted; without, the wire is neither encrypted nor signed.

    Raises:
        NetworkError: nothing can listen there.
    """

    def __init__(
        self,
        address: Address,
        lender: Lender,
        *,
        key: bytes,
        digest: str,
        encryption: Encryption | None = None,
        coming: ComingEntries | None = None,
    ) -> None:
        self._door = Door(address, key)
        self.port = self._door.port
        self.hello = Hello(digest, secrets.token_bytes(16))
        self.lender = lender
        self._coming = coming or ComingEntries()
        self._encryption = encryption or Encryption()
        self._callers: dict[socket.socket, None] = {}  # in the order in which they came
        self._changing = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="kv-peers", daemon=True).start()

    def close(self) -> None:
        """Let go of all callers, and listen no more."""
        with self._changing:
            self._is_closed = True
            for stream in self._callers:
                _shut(stream)
        self._door.close()

    def _accept(self) -> None:
        with suppress(NetworkError):  # the door is closed
            while True:
                stream = self._door.take(PURPOSE, time.monotonic() + _FOREVER_S)
                threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        with self._changing:
            if len(self._callers) == _MOST_CALLERS:
                first = next(iter(self._callers))
                del self._callers[first]
                _shut(first)
            self._callers[stream] = None
            if self._is_closed:
                _shut(stream)
        channel: Channel[Question] = Channel(stream, Question)
        try:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                if (option := getattr(socket, name, None)) is not None:
                    stream.setsockopt(socket.IPPROTO_TCP, option, value)
            self._talk(channel, stream)
        except (OSError, msgspec.DecodeError) as error:
            _log.debug("An engine that reads KV is let go of: %s", error)
        finally:
            with self._changing:
                self._callers.pop(stream, None)
            channel.close()

    def _talk(self, channel: Channel[Question], stream: socket.socket) -> None:
        until_s = time.monotonic() + _FIRST_WORD_S
        hello = channel.receive(until_s=until_s, most_bytes=_MOST_QUESTION_BYTES)
        channel.send(self.hello, until_s=until_s)
        if not isinstance(hello, Hello) or hello.digest != self.hello.digest:
            return
        while True:
            stream.settimeout(None)
            question = channel.receive(most_bytes=_MOST_QUESTION_BYTES)
            match question:
                case AskSizes(keys=keys):
                    answer: EntrySizes | Entries = EntrySizes([self._size(key) for key in keys])
                case AskEntries(keys=keys):
                    answer = Entries(self._values(keys))
                case _:
                    return
            channel.send(answer, until_s=time.monotonic() + _TAKE_S)

    def _size(self, key: bytes) -> int:
        is_coming = key in self._coming  # asked first, or one might be neither there nor coming
        entry = self.lender.peek(key)
        if entry is not None:
            return entry.num_bytes
        return self.lender.entry_bytes if is_coming else 0

    def _values(self, keys: list[bytes]) -> list[bytes]:
        values, left = [], MOST_REPLY_BYTES
        until_s = time.monotonic() + _COMING_S
        for key in keys:
            if key in self._coming:
                self._coming.wait(key, until_s)
            entry = self.lender.peek(key) if left > 0 else None
            value = b""
            if entry is not None:
                value = self._encryption.seal(encode_entry(entry), content_name(key))
            values.append(value)
            left -= len(value)
        return values


def _shut(stream: socket.socket) -> None:
    with suppress(OSError):  # it is gone
        stream.shutdown(socket.SHUT_RDWR)
