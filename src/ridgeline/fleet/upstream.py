"""Connections to an engine: HTTP/1.1, one request at a time on each."""

import asyncio
import errno
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import httptools
import msgspec

from ridgeline.server.config import base_url

_IDLE_S = 20.0  # shorter than a server keeps a connection
_MAX_UNREAD_BYTES = 1 << 20  # of an answer that nobody takes yet
_MAX_HEADERS = 256
_MAX_HEADER_BYTES = 64 << 10  # of all that is no body, between two pieces of it


class UpstreamError(OSError):
    """The engine was not reached, or is lost."""


class OwnLimitError(UpstreamError):
    """No connection can be made, which is no fault of the engine's."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The beginning of an answer; names of headers are in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]

    @property
    def fields(self) -> Mapping[bytes, bytes]:
        return dict(self.headers)


class Attempt:
    """One request to one engine: its answer as it comes.

    ``head`` is there first, then the body is given to whoever is attached, and `ended` is set.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._head: asyncio.Future[AnswerHead] = loop.create_future()
        self._begun: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        for future in (
            self._head,
            self._begun,
            self._ended,
        ):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._take: Callable[[bytes], None] | None = None
        self._unread: list[bytes] = []
        self._num_unread = 0
        self.connection: UpstreamConnection | None = None
        self.last_s = loop.time()
        self.may_not_fall_silent = False
        self.is_paused = False

    @property
    def head(self) -> Awaitable[AnswerHead]:
        """Raises `UpstreamError`."""
        return self._head

    @property
    def begun(self) -> Awaitable[None]:
        """The first byte of the body, or its end. Raises `UpstreamError`."""
        return self._begun

    @property
    def ended(self) -> Awaitable[None]:
        """Raises `UpstreamError` if it broke off."""
        return self._ended

    def attach(self, take: Callable[[bytes], None]) -> None:
        """Give the body to ``take``, from its beginning."""
        self._take = take
        unread, self._unread = b"".join(self._unread), []
        if unread:
            take(unread)
        if self.connection is not None:
            self.connection.resume()

    async def whole(self, most_bytes: int) -> bytes:
        """The body, once it has ended.

        Raises:
            UpstreamError: it breaks off, is longer than ``most_bytes``, or the engine falls silent.
        """
        body = bytearray()

        def keep(data: bytes) -> None:
            if len(body) + len(data) > most_bytes:
                raise ValueError(f"The engine answers more than {most_bytes} bytes.")
            body.extend(data)

        self.may_not_fall_silent = True
        try:
            self.attach(keep)
        except ValueError as error:
            raise UpstreamError(str(error)) from None
        await self.ended
        return bytes(body)

    def pause(self) -> None:
        """Read no more: whoever is to take it is slow. Silence is no sign until `resume`."""
        self.is_paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        self.is_paused, self.last_s = False, self._loop.time()
        if self.connection is not None:
            self.connection.resume()

    def has_fallen_silent(self, before_s: float) -> bool:
        """Whether it should have said something after that time, and has not."""
        return self.may_not_fall_silent and not self.is_paused and self.last_s < before_s

    def fail(self, reason: str) -> None:
        """Give it up, as if the connection were lost."""
        self.on_end(UpstreamError(reason))
        self.close()

    def close(self) -> None:
        """Nobody wants the answer any more."""
        if self.connection is not None:
            self.connection.abort()

    def on_head(self, head: AnswerHead) -> None:
        self.last_s = self._loop.time()
        if not self._head.done():
            self._head.set_result(head)

    def on_body(self, data: bytes) -> None:
        self.last_s = self._loop.time()
        if self._take is not None:
            self._take(data)
            return
        if not self._begun.done():
            self._begun.set_result(None)
        self._unread.append(data)
        self._num_unread += len(data)
        if self._num_unread > _MAX_UNREAD_BYTES and self.connection is not None:
            self.connection.pause()

    def on_end(self, error: UpstreamError | None) -> None:
        self.connection = None if error is None else self.connection
        if error is None:
            for ended in (self._begun, self._ended):
                if not ended.done():
                    ended.set_result(None)
            return
        for future in (self._head, self._begun, self._ended):
            if not future.done():
                future.set_exception(error)


# What reading another's JSON raises: msgspec lets through bad UTF-8, and nesting without end.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class UpstreamConnection(asyncio.Protocol):
    """One connection; goes back to its pool when an answer is whole."""

    def __init__(self, pool: "UpstreamPool") -> None:
        self._pool = pool
        self._attempt: Attempt | None = None
        self._transport: asyncio.Transport | None = None
        self._is_head = False
        self._num_header_bytes = 0
        self._pieces: list[bytes] = []
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_whole = False
        self.idle_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, attempt: Attempt, request: bytes, *, is_head: bool) -> None:
        """Send a request, whose answer is the attempt's. ``is_head``: its answer has no body."""
        assert self._transport is not None
        self._attempt, attempt.connection = attempt, self
        self._is_head, self._is_whole = is_head, False
        self._headers, self._num_header_bytes = [], 0
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    def pause(self) -> None:
        """Read no more: whoever is to take it is slow."""
        if self.is_open and self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.is_open and self._transport is not None:
            self._transport.resume_reading()

    def abort(self) -> None:
        """End the connection, and with it what the engine does for it."""
        self._attempt = None
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        attempt = self._attempt
        if attempt is None:  # what nobody asked for
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            attempt.fail(f"The engine's answer is not HTTP: {error}.")
            return
        if not self._pieces:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > _MAX_HEADER_BYTES:
                attempt.fail("The engine's answer is not HTTP: headers without end.")
                return
        else:
            pieces, self._pieces = self._pieces, []
            self._num_header_bytes = 0
            try:
                attempt.on_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            except ValueError as error:
                attempt.fail(str(error))
        if self._is_whole and self._attempt is attempt:
            self._attempt = None
            keeps = self._parser.should_keep_alive() and not self._is_head
            attempt.on_end(None)
            if keeps:
                self._pool.give_back(self)
            else:
                self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        attempt, self._attempt = self._attempt, None
        self._pool.forget(self)
        if attempt is not None:
            attempt.on_end(UpstreamError("The engine closed the connection."))

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise ValueError("what follows the answer is none of it")

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self._headers) == _MAX_HEADERS:
            raise ValueError("too many headers")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._attempt is not None:
            self._attempt.on_head(AnswerHead(status, self._headers))
            self._is_whole = self._is_head
        self._headers = []

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = self._parser.get_status_code() >= 200


class UpstreamPool:
    """Connections to one engine, by ``http://host:port`` or ``https://…``.

    Raises:
        SettingsError: the URL is none, or has a path.
    """

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        self.url, self.host, self.port = base_url(url, "the address of an engine")
        self._ssl = ssl.create_default_context() if self.url.startswith("https:") else None
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[UpstreamConnection] = []

    async def send(self, request: bytes, *, is_head: bool = False) -> Attempt:
        """Send a request on a free connection, or a new one.

        Raises:
            UpstreamError: none can be made.
            OwnLimitError: whatever engine it is.
        """
        loop = asyncio.get_running_loop()
        connection = self._take(loop.time())
        if connection is None:
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    _, connection = await loop.create_connection(
                        lambda: UpstreamConnection(self), self.host, self.port, ssl=self._ssl
                    )
            except (OSError, TimeoutError) as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise OwnLimitError("This router has no descriptor left (ulimit -n).") from None
                cause = getattr(error, "strerror", None) or "it takes too long"
                raise UpstreamError(f"{self.url} cannot be reached: {cause}.") from None
        attempt = Attempt(loop)
        connection.begin(attempt, request, is_head=is_head)
        return attempt

    def _take(self, now_s: float) -> UpstreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now_s < connection.idle_since_s + _IDLE_S:
                return connection
            connection.abort()
        return None

    def give_back(self, connection: UpstreamConnection) -> None:
        """It may be used again."""
        connection.idle_since_s = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """It is closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """End those that nobody uses."""
        while self._idle:
            self._idle.pop().abort()
