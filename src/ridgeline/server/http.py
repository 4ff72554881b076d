"""HTTP/1.1 by uvicorn and httptools, with limits on a request's head and on slow readers."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ridgeline.server.context import new_id
from ridgeline.server.errors import bad_request, family_of
from ridgeline.server.replies import encode

MAX_HEAD_BYTES = 64 << 10
_ONCE = (b"content-length", b"transfer-encoding", b"host")
_HEAD_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_TOO_LONG = "The head of the request is too long."
_UNDECIDED = (_HEAD_END, b"\r\nupgrade:")


def http_protocol(
    *, head_timeout_s: float, stall_timeout_s: float, refused: Callable[[str], None]
) -> type[HttpToolsProtocol]:
    """A `BoundedHttpProtocol` with these timeouts.

    ``refused`` is called with the id of each request that is answered here, since it is none.
    """
    settings = {
        "head_timeout_s": head_timeout_s,
        "stall_timeout_s": stall_timeout_s,
        "refused": staticmethod(refused),
    }
    return type("HttpProtocol", (BoundedHttpProtocol,), settings)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose head is too long, too slow, or has two readings; or whose reader
    takes nothing for ``stall_timeout_s`` while there is more than the buffers hold.

    Two readings: both a Content-Length and a Transfer-Encoding, or one of these or Host twice; a
    proxy in front may go by the other one. A stream over HTTP/1.0 or 0.9, without chunks, ends with
    the connection.
    """

    head_timeout_s: float
    stall_timeout_s: float
    refused: Callable[[str], None]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._head_bytes = 0
        self._in_head = True
        self._offers = _Offers()
        self._problem: str | None = None
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
            data = self._offers.removed(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(_TOO_LONG)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, in the shape of other errors, and end the connection.

        Where the error would be taken for the answer to another request, or for a part of one, the
        connection ends without it.
        """
        if not self._may_answer():
            self.transport.close()
            return
        request_id = new_id("req-").encode()
        family = family_of(getattr(self, "url", b"").decode("latin-1"))
        body = encode(bad_request(self._problem or msg).body(family, request_id.decode()))
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\nx-request-id: %b\r\nrequest-id: %b\r\n"
            b"x-content-type-options: nosniff\r\n\r\n%b" % (len(body), request_id, request_id, body)
        )
        self.transport.close()
        self.refused(request_id.decode())

    def _may_answer(self) -> bool:
        """Whether what is written now is an answer to the request that is being read."""
        if self._in_head:
            return self.cycle is None or self.cycle.response_complete
        return not self.pipeline and not self.cycle.response_started

    def on_message_begin(self) -> None:
        self._in_head = True
        self._watch_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        self._unwatch_head()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refuse(_TOO_LONG)
        names = [name for name, _ in self.headers]
        counts = {name: names.count(name) for name in _ONCE}
        has_two_lengths = counts[b"content-length"] and counts[b"transfer-encoding"]
        if has_two_lengths or max(counts.values()) > 1:
            self._refuse("The request has two readings: a header is there twice, or two lengths.")
        if self.parser.should_upgrade():  # CONNECT, or an offer that a pipeline hid from us
            self._refuse("The protocol cannot be changed.")
        super().on_headers_complete()
        self._in_head = False  # from here on, the cycle is that of the request that is read
        if self.parser.get_http_version() in ("0.9", "1.0"):
            _end_with_connection(self.cycle)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def _refuse(self, problem: str) -> None:
        """End the parsing, whose error becomes a 400 that tells the problem."""
        self._problem = problem
        raise ValueError(problem)

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


class _Offers:
    """Takes the offer of another protocol, after which the parser would read no body, out of heads.

    ``curl --http2`` and Java's HttpClient offer HTTP/2 with every request.
    """

    def __init__(self) -> None:
        self._held = b""

    def removed(self, data: bytes) -> bytes:
        """The next piece of a connection, within a head, without what may become an offer."""
        head, end, body = (self._held + data).partition(_HEAD_END)
        kept = len(head) if end else len(head) - _undecided_length(head)
        self._held = head[kept:]
        return _UPGRADE.sub(b"\r\nIgnored:", head[:kept]) + end + body


def _undecided_length(head: bytes) -> int:
    """Length of the longest end that may become an offer, or the end of the head."""
    for length in range(max(map(len, _UNDECIDED)) - 1, 0, -1):
        tail = head[-length:].lower()
        if len(tail) == length and any(whole.startswith(tail) for whole in _UNDECIDED):
            return length
    return 0


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """Have a body whose length is not known end with the connection, not in chunks.

    uvicorn has no such body: each piece is announced as all that is left.
    """
    send = cycle.send

    async def send_plain(message: Any) -> None:
        if message["type"] == "http.response.start":
            cycle.chunked_encoding = False
        else:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]
