"""HTTP/1.1 by uvicorn and httptools, with limits on what a request is and on slow readers."""

import asyncio
import re
import resource
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from ridgeline.server.errors import ApiError, bad_request, family_of
from ridgeline.server.ids import new_id
from ridgeline.server.replies import encode

MAX_HEAD_BYTES = 64 << 10
_CHUNK_BYTES = 32  # allowed around the data of each chunk
_MIN_BODY_RATE = 16 << 10  # bytes per second, below which a sender is given up
_MAX_PIPELINE = 64  # requests on one connection that wait for their turn
_MOST_DESCRIPTORS = 1 << 16  # where there is no limit
_KEPT_DESCRIPTORS = 128  # for what is no connection of a client, or half of those that there are
_ONCE = (
    b"content-length", b"transfer-encoding", b"host",
    b"authorization", b"x-api-key", b"origin", b"content-type", b"content-encoding",
)  # fmt: skip
_ASK_AFTER_S = (0.0, 0.25, 0.5, 2.0)  # the second tells who left, after a round trip
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_HEAD_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_TOO_LONG = "The head of the request is too long."
_UNDECIDED = (_HEAD_END, b"\r\nupgrade:")


def http_protocol(
    *,
    part_timeout_s: float,
    stall_timeout_s: float,
    max_body_bytes: int,
    refused: Callable[[str, int], None],
    descriptors_each: int = 1,
) -> type[HttpToolsProtocol]:
    """A `BoundedHttpProtocol` with these bounds.

    ``refused`` is called with the id and status of each request that is answered here, since it is
    none, or not a whole one. ``descriptors_each``: how many a request takes of those that this
    process may have (``ulimit -n``).
    """
    settings = {
        "part_timeout_s": part_timeout_s,
        "stall_timeout_s": stall_timeout_s,
        "max_body_bytes": max_body_bytes,
        "refused": staticmethod(refused),
        "most_connections": _most_connections(descriptors_each),
        "open_connections": {},
    }
    return type("HttpProtocol", (BoundedHttpProtocol,), settings)


def _most_connections(descriptors_each: int) -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        limit = _MOST_DESCRIPTORS
    return max(1, (limit - min(limit // 2, _KEPT_DESCRIPTORS)) // descriptors_each)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose request is too long, too slow, or has two readings; or whose reader
    takes nothing for ``stall_timeout_s`` while there is more than the buffers hold.

    Too long: what is not body (request line, headers, chunk sizes and extensions) over
    `MAX_HEAD_BYTES` and 32 bytes a chunk, or a body over ``max_body_bytes``, which is more than any
    route takes. Too slow: a head that is not whole after
    ``part_timeout_s``, or less than 16 KiB/s of body over each such time, until the last byte of
    the message. Trailers are refused. Two readings: both a Content-Length and a Transfer-Encoding,
    one of these or what decides who asks twice, or a coding other than chunks; a proxy in front may
    go by another one. A stream over HTTP/1.0 or 0.9, without chunks, ends with the connection.
    Who only reads after its requests (a connection half closed) gets the answers.

    Of more than ``most_connections`` one is closed that has no whole request: without a body before
    those that are sending one. So who only connects takes nobody's place who asks.
    """

    part_timeout_s: float
    stall_timeout_s: float
    max_body_bytes: int
    refused: Callable[[str, int], None]
    most_connections: int
    open_connections: dict["BoundedHttpProtocol", None]  # oldest first

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._in_head = True
        self._framing_bytes = 0  # of the message that is read: all that is not body
        self._max_framing_bytes = MAX_HEAD_BYTES
        self._body_bytes = 0
        self._body_bytes_before = 0  # when the timer was set
        self._offers = _Offers()
        self._problem: str | None = None
        self._answered: RequestResponseCycle | None = None  # uvicorn's cycle is the last that came
        self._sender_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_sender()
        self.open_connections[self] = None
        if len(self.open_connections) > self.most_connections:
            self._make_room()

    def _make_room(self) -> None:
        """Close the connection that has sent the least of a request, or this one if none waits."""
        least: BoundedHttpProtocol | None = None
        for each in self.open_connections:
            if each is self or not each._waits_for_its_client:
                continue
            if least is None or each._body_bytes < least._body_bytes:
                least = each
            if not each._body_bytes:
                break
        least = least or self
        del self.open_connections[least]
        least.transport.close()

    @property
    def _waits_for_its_client(self) -> bool:
        is_answered = self.cycle is None or self.cycle.response_complete
        has_whole = self.pipeline or (self._in_head and not is_answered)
        return not has_whole and self.transport.get_write_buffer_size() == 0

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_connections.pop(self, None)
        self._unwatch_sender()
        self._unwatch_reader()
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # which uvicorn leaves after a reset

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._unwatch_reader()
        super().resume_writing()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: there are answers to come, and no half request."""
        is_between = self._in_head and self._sender_timer is None
        if not is_between or self.cycle is None or self.cycle.response_complete:
            return False
        self.cycle.keep_alive = False  # the last one
        self._ask_reader(*_ASK_AFTER_S)
        return True

    def _ask_reader(self, after_s: float, *later_s: float) -> None:
        """Find out who has left instead of only ending what it sends: to write to it fails.

        HTTP/1.1 lets servers say 100 (Continue) as often as they like (RFC 9110, section 15.2); to
        HTTP/1.0 nothing can be said before its answer.
        """

        def ask() -> None:
            answered = self._answered
            if self.transport.is_closing() or answered is None or answered.response_started:
                return
            if answered.scope["http_version"] == "1.1":
                self.transport.write(_CONTINUE)
            if later_s:
                self._ask_reader(*later_s)

        self.loop.call_later(after_s, ask)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._framing_bytes += len(data)
        if self._in_head:
            data = self._offers.removed(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._framing_bytes > self._max_framing_bytes:
            self.send_400_response(_TOO_LONG)
        elif self._in_head and (self.cycle is None or self.cycle.response_complete):
            self._watch_sender()  # also empty lines, after which no request need come

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, as `_end_with` does."""
        self._end_with(bad_request(self._problem or msg))

    def _end_with(self, error: ApiError) -> None:
        """Answer in the shape of other errors, and end the connection.

        Where the error would be taken for the answer to another request, or for a part of one, the
        connection ends without it.
        """
        if not self._may_answer():
            self.transport.close()
            return
        request_id = new_id("req-").encode()
        family = family_of(getattr(self, "url", b"").decode("latin-1"))
        body = encode(error.body(family, request_id.decode()))
        self.transport.write(
            b"%bcontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\nx-request-id: %b\r\nrequest-id: %b\r\n"
            b"x-content-type-options: nosniff\r\n\r\n%b"
            % (STATUS_LINE[error.status], len(body), request_id, request_id, body)
        )
        self.transport.close()
        self.refused(request_id.decode(), error.status)

    def _may_answer(self) -> bool:
        """Whether what is written now is an answer to the request that is being read."""
        if self._in_head:
            return self.cycle is None or self.cycle.response_complete
        return not self.pipeline and not self.cycle.response_started

    def on_message_begin(self) -> None:
        self._watch_sender()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            self._refuse("Fields after the body (trailers) are not taken.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        is_old = self.parser.get_http_version() in ("0.9", "1.0")
        self._check_headers(is_old)
        if self.parser.should_upgrade():  # CONNECT, or an offer that a pipeline hid from us
            self._refuse("The protocol cannot be changed.")
        if len(self.pipeline) == _MAX_PIPELINE:
            self._refuse("Too many requests wait on this connection.")
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # or nobody would notice that the client leaves
        else:
            self._answered = self.cycle
        self._in_head = False  # from here on, the cycle is that of the request that is read
        self._unwatch_sender()
        self._watch_sender()
        if is_old:
            _end_with_connection(self.cycle)

    def _check_headers(self, is_old: bool) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refuse(_TOO_LONG)
        names = [name for name, _ in self.headers]
        counts = {name: names.count(name) for name in _ONCE}
        has_two_lengths = counts[b"content-length"] and counts[b"transfer-encoding"]
        if has_two_lengths or max(counts.values()) > 1:
            self._refuse("The request has two readings: a header is there twice, or two lengths.")
        coding = dict(self.headers).get(b"transfer-encoding", b"chunked")
        if coding.strip().lower() != b"chunked" or (counts[b"transfer-encoding"] and is_old):
            self._refuse("The only Transfer-Encoding is chunked, and not in HTTP/1.0.")

    def on_chunk_header(self) -> None:
        """Called by the parser after the size of each chunk."""
        self._max_framing_bytes += _CHUNK_BYTES

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        self._body_bytes += len(body)
        if self._body_bytes > self.max_body_bytes:
            self._refuse("The body is too large.")
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._framing_bytes = self._body_bytes = 0
        self._max_framing_bytes = MAX_HEAD_BYTES
        self._unwatch_sender()

    def on_response_complete(self) -> None:
        self._answered = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()

    def _refuse(self, problem: str) -> None:
        """End the parsing, whose error becomes a 400 that tells the problem."""
        self._problem = problem
        raise ValueError(problem)

    def _watch_sender(self) -> None:
        if self._sender_timer is None:
            self._body_bytes_before = self._body_bytes
            self._sender_timer = self.loop.call_later(self.part_timeout_s, self._look_at_sender)

    def _unwatch_sender(self) -> None:
        if self._sender_timer is not None:
            self._sender_timer.cancel()
            self._sender_timer = None

    def _look_at_sender(self) -> None:
        """Give up whose head is not whole, or whose body has not kept its pace."""
        self._sender_timer = None
        if self.transport.is_closing():
            return
        came = self._body_bytes - self._body_bytes_before
        keeps_pace = not self._in_head and came >= _MIN_BODY_RATE * self.part_timeout_s
        if keeps_pace or self.flow.read_paused:  # then we are slow, not the sender
            self._watch_sender()
        elif self._in_head:
            self.transport.close()
        else:
            self._end_with(ApiError(408, "The body did not arrive in time."))

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
