"""Connections between machines: both ends prove that they have the same key.

A connection begins with messages of fixed sizes. Each end sends 32 random bytes, and proves by
HMAC-SHA-256 over both, over its side and over what the connection is for (16 bytes), that it has
the key. So nothing that was recorded can be sent again, and nothing is read, let alone allocated,
for somebody without the key. What follows is neither encrypted nor signed.
"""

import hmac
import secrets
import socket
import threading
import time
from contextlib import suppress

from ridgeline.core.errors import NetworkError, SettingsError

Address = tuple[str, int]

PURPOSE_BYTES = 16
JOINING = bytes(PURPOSE_BYTES)  # the purpose of a worker's first connection
_MAGIC = b"ridgeline ranks 1"  # other programs are noticed before they are waited for
_NONCE_BYTES = _PROOF_BYTES = 32
_PROVE_S = 5.0
_LEAST_S = 0.001  # a limit of zero would mean: do not wait, and another error
_MOST_UNPROVEN = 64  # connections at once that have not proven anything yet
_MOST_WAITING = 1024  # that nobody has taken: they may be for what this door knows nothing of


def read_address(text: str) -> Address:
    """``HOST:PORT``; a host of IPv6 in brackets.

    Raises:
        SettingsError: it is not that.
    """
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
        raise SettingsError(f"{text!r} is no address: expected HOST:PORT.")
    host = host.removeprefix("[").removesuffix("]")
    try:
        host.encode("idna")  # as connecting will
        is_name = not set(host) & set("/, ")
    except UnicodeError:
        is_name = False
    if not is_name:
        raise SettingsError(f"{text!r} is no address: {host!r} is no name of a host.")
    return host, int(port)


class Door:
    """Listens, and keeps connections until they are asked for by their purpose; of those that
    nobody asks for, the last `_MOST_WAITING`. A connection that proves nothing is ended after
    `_PROVE_S`, and earlier where `_MOST_UNPROVEN` have come after it.

    Raises:
        NetworkError: nothing can listen there.
    """

    def __init__(self, address: Address, key: bytes) -> None:
        self._key = key
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._listener = socket.create_server(address, family=family, backlog=_MOST_WAITING)
        except OSError as error:
            raise NetworkError(
                f"Nothing can listen at {address[0]}:{address[1]}: {error.strerror or error}."
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._arrived: list[tuple[bytes, socket.socket]] = []  # oldest first
        self._changed = threading.Condition()
        self._is_closed = False
        self._unproven: dict[socket.socket, None] = {}  # oldest first
        self._rooms = threading.Semaphore(_MOST_UNPROVEN)  # for those
        threading.Thread(target=self._listen, daemon=True).start()

    def take(self, purpose: bytes, until_s: float) -> socket.socket:
        """A connection for a purpose, which arrives before ``time.monotonic()`` is ``until_s``.

        Raises:
            NetworkError: none did.
        """
        with self._changed:
            while not (found := [each for each in self._arrived if each[0] == purpose]):
                left_s = until_s - time.monotonic()
                if left_s <= 0 or self._is_closed:
                    raise NetworkError("A machine did not connect in time.")
                self._changed.wait(left_s)
            self._arrived.remove(found[-1])
            return found[-1][1]

    def close(self) -> None:
        """Stop listening; what nobody took is closed."""
        with self._changed:
            self._is_closed = True
            for _, stream in self._arrived:
                stream.close()
            self._arrived.clear()
            self._changed.notify_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # no descriptor is free
                continue
            if not self._rooms.acquire(blocking=False):
                self._hurry()
                self._rooms.acquire()
            with self._changed:
                self._unproven[stream] = None
            threading.Thread(target=self._welcome, args=(stream,), daemon=True).start()

    def _hurry(self) -> None:
        """End the connection that has proven nothing for the longest time."""
        with self._changed, suppress(OSError):
            for stream in self._unproven:
                stream.shutdown(socket.SHUT_RDWR)
                return

    def _welcome(self, stream: socket.socket) -> None:
        try:
            purpose = _check_caller(stream, self._key)
        except OSError:
            purpose = None
        with self._changed:
            del self._unproven[stream]
            self._rooms.release()
            if purpose is None or self._is_closed:
                stream.close()
                return
            self._arrived.append((purpose, stream))
            if len(self._arrived) > _MOST_WAITING:
                self._arrived.pop(0)[1].close()
            self._changed.notify_all()


def connect(address: Address, key: bytes, purpose: bytes = JOINING) -> socket.socket:
    """A connection to the `Door` at an address.

    Raises:
        OSError: nobody is there.
        NetworkError: somebody is, without the key.
    """
    stream = socket.create_connection(address, timeout=_PROVE_S)
    try:
        own = secrets.token_bytes(_NONCE_BYTES)
        stream.sendall(_MAGIC + own + purpose)
        answer = _received(stream, _NONCE_BYTES + _PROOF_BYTES, time.monotonic() + _PROVE_S)
        theirs, their_proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        said = own + theirs + purpose
        if not hmac.compare_digest(their_proof, _proof(key, b"door", said)):
            raise NetworkError(f"{address[0]}:{address[1]} has another key.")
        stream.sendall(_proof(key, b"caller", said))
    except BaseException:
        stream.close()
        raise
    _make_plain(stream)
    return stream


def _check_caller(stream: socket.socket, key: bytes) -> bytes | None:
    """What a connection is for; ``None`` if its other end has not the key."""
    until_s = time.monotonic() + _PROVE_S
    if _received(stream, len(_MAGIC), until_s) != _MAGIC:
        return None
    theirs = _received(stream, _NONCE_BYTES, until_s)
    purpose = _received(stream, PURPOSE_BYTES, until_s)
    own = secrets.token_bytes(_NONCE_BYTES)
    said = theirs + own + purpose
    stream.sendall(own + _proof(key, b"door", said))
    proof = _received(stream, _PROOF_BYTES, until_s)
    if not hmac.compare_digest(proof, _proof(key, b"caller", said)):
        return None
    _make_plain(stream)
    return purpose


def _proof(key: bytes, side: bytes, said: bytes) -> bytes:
    return hmac.digest(key, side + said, "sha256")


def _received(stream: socket.socket, size: int, until_s: float) -> bytes:
    """So many bytes by then; raises ``OSError`` without them."""
    data = b""
    while len(data) < size:
        stream.settimeout(max(_LEAST_S, until_s - time.monotonic()))
        part = stream.recv(size - len(data))
        if not part or time.monotonic() > until_s:
            raise OSError("the other end is gone, or too slow")
        data += part
    return data


def _make_plain(stream: socket.socket) -> None:
    """As a socket pair is: it blocks, and sends at once."""
    stream.settimeout(None)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
