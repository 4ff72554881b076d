"""HTTP/1.1 by uvicorn and httptools, with limits on a request's head and on slow readers."""

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
_ONCE = (b"content-length", b"transfer-encoding", b"host")
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


def http_protocol(*, head_timeout_s: float, stall_timeout_s: float) -> type[HttpToolsProtocol]:
    """A `BoundedHttpProtocol` with these timeouts."""
    settings = {"head_timeout_s": head_timeout_s, "stall_timeout_s": stall_timeout_s}
    return type("HttpProtocol", (BoundedHttpProtocol,), settings)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose head is too long, too slow, or has two readings; or whose reader
    takes nothing for ``stall_timeout_s`` while there is more than the buffers hold.

    Two readings: both a Content-Length and a Transfer-Encoding, or one of these or Host twice; a
    proxy in front may go by the other one.
    """

    head_timeout_s = 30.0
    stall_timeout_s = 60.0

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        self._unwatch_reader()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._unwatch_reader()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            data = _without_upgrade(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        self._in_head = True
        self._watch_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._unwatch_head()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            raise ValueError("the head is too long")  # the parser turns it into 400
        names = [name for name, _ in self.headers]
        counts = {name: names.count(name) for name in _ONCE}
        has_two_lengths = counts[b"content-length"] and counts[b"transfer-encoding"]
        if has_two_lengths or max(counts.values()) > 1:
            raise ValueError("the request has two readings")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def _watch_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.stall_timeout_s, self._end_stall, unread)

    def _end_stall(self, unread: int) -> None:
        """Abort, unless some of the bytes that were ``unread`` have been taken since."""
        if self.transport.get_write_buffer_size() < unread:
            self._watch_reader()
        else:
            self.transport.abort()

    def _unwatch_reader(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """A head without its offer of another protocol, after which the parser would read no body.

    ``curl --http2`` and Java's HttpClient offer HTTP/2 with every request.
    """
    head, end, body = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nIgnored:", head) + end + body
