"""From ASGI to a route and back: bodies in, replies and streams out, disconnects noticed."""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from ridgeline.core.errors import EngineUnavailableError, RidgelineError
from ridgeline.core.spelling import suggestion
from ridgeline.engine.request_factory import check_task
from ridgeline.server.body import (
    ClientDisconnectedError,
    check_encoding,
    declared_length,
    decode_request,
    read_body,
)
from ridgeline.server.context import SHUTTING_DOWN, Call, Server
from ridgeline.server.continuation import HANDED_OVER, HandedOverError, routed
from ridgeline.server.errors import ApiError, ApiFamily, bad_request, to_api_error
from ridgeline.server.pool.choice import of_model
from ridgeline.server.replies import EventStream, FileReply, Reply, encode, error_event

_log = logging.getLogger(__name__)
# What clients add to any path, and means nothing here: Anthropic's, and Azure's.
INERT_QUERY = ("beta", "api-version")
_SAFE_METHODS = ("GET", "HEAD")  # whose bodies mean nothing
_FILE_CHUNK_BYTES = 1 << 16
_STREAM_TYPES = {False: b"text/event-stream; charset=utf-8", True: b"application/x-ndjson"}
_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Answer = Reply | EventStream | FileReply
Handler = Callable[..., Coroutine[Any, Any, Answer]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        method: of HTTP.
        path: with parameters in braces.
        handler: takes the `Call`, and the decoded body where there is a ``request`` schema, or the
            ASGI ``receive`` where ``reads_raw``.
        summary: a line for ``/openapi.json``.
        request: schema of the body.
        answer: schema of the reply, for ``/openapi.json``.
        family: whose form errors have.
        reads_raw: the handler reads the body itself.
        needs_admin: only the admin key will do.
        prompt_field: where a request has what the model reads.
        generates: its calls count as requests, for RPM and goodput.
        in_batches: lines of a batch may ask for it.
        is_probe: monitors ask it all the time, so that only what goes wrong with it is logged.
        is_counted: it counts as one of the key's requests a minute, as what takes a place among
            those in progress does.
        is_continued: its streams can go on in another server.
        of_model: it is about one model, which of several is loaded for it.
        query: JSON Schema by parameter that it reads; probes are asked with any.
        form: JSON Schema of a multipart body, for ``/openapi.json``.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    _: KW_ONLY
    request: type | None = None
    answer: Any = None
    family: ApiFamily = ApiFamily.OPENAI
    reads_raw: bool = False
    needs_admin: bool = False
    prompt_field: str = "prompt"
    generates: bool = False
    in_batches: bool = False
    is_probe: bool = False
    is_counted: bool = False
    is_continued: bool = False
    of_model: bool = False
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    form: Mapping[str, Any] | None = None


class _NoFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a route that reads none."""


_NO_FIELDS = msgspec.json.Decoder(_NoFields)


class Endpoint:
    """The ASGI application of one operation."""

    def __init__(self, server: Server, operation: Operation) -> None:
        self._server = server
        self._operation = operation
        self._decoder: msgspec.json.Decoder[Any] | None = (
            None if operation.request is None else msgspec.json.Decoder(operation.request)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope["state"]["call"]
        call.path = self._operation.path
        call.path_params = scope.get("path_params", {})
        call.family = self._operation.family
        call.prompt_field = self._operation.prompt_field
        call.is_probe = self._operation.is_probe
        sender = _Sender(send, is_head=scope["method"] == "HEAD")
        try:
            with call.admission:
                if self._operation.is_counted:
                    self._server.limits.count_request(call.caller)
                call.routed = routed(call.headers, self._server.router_key)
                self._read_query(call, scope["query_string"].decode("latin-1"))
                arguments = await self._arguments(call, scope, receive)
                answering = self._answer(call, arguments, sender)
                # Who reads the body itself sees the disconnect, too.
                leaving = _never() if self._operation.reads_raw else _disconnected(receive)
                await self._unless(leaving, answering)
        except ClientDisconnectedError:
            call.outcome = "disconnected"
        except Exception as error:  # every failure has an answer, or an end of the stream
            await self._fail(call, sender, error)

    def _read_query(self, call: Call, text: str) -> None:
        """ApiError 400 for a known query parameter that is there twice, or one that is not known,
        unless such are ignored."""
        operation = self._operation
        pairs = parse_qsl(text, keep_blank_values=True)
        call.query = dict(pairs)
        if operation.is_probe:
            return
        known = {*operation.query, *INERT_QUERY, *(["model"] if operation.of_model else [])}
        counts = Counter(name for name, _ in pairs if name in known)
        if twice := next((name for name, count in counts.items() if count > 1), None):
            raise bad_request(f"{twice}: this query parameter is there twice.", twice)
        unknown = [name for name in call.query if name not in known]
        if not unknown:
            return
        if self._server.config.unknown_fields == "refuse":
            name = unknown[0][:80]
            meant = suggestion(name, known)
            text = f"{name}: this query parameter is not known{meant}"
            raise bad_request(text, name, "unknown_field")
        call.ignored_fields = unknown

    async def _arguments(self, call: Call, scope: Scope, receive: Receive) -> list[Any]:
        if self._operation.needs_admin:
            call.check_admin()
        if self._operation.reads_raw:
            return [receive]
        if self._decoder is None and scope["method"] in _SAFE_METHODS:
            return []
        limit = self._server.config.max_body_mib << 20
        headers = dict(scope["headers"])
        check_encoding(headers)
        declared_length(headers, limit)
        body = await read_body(receive, limit=limit)
        if call.routed is not None:
            body = call.routed.take_state(body)
            if call.routed.state is not None and not self._operation.is_continued:
                raise ApiError(400, "Streams of this route do not go on elsewhere.")
        call.body_bytes = len(body)
        if self._decoder is None and not body.strip():
            return []
        unknown_fields = self._server.config.unknown_fields
        decoder = self._decoder or _NO_FIELDS
        value, ignored = await call.read(decode_request, decoder, body, unknown_fields)
        call.ignored_fields += ignored
        return [] if self._decoder is None else [value]

    async def _answer(self, call: Call, arguments: list[Any], sender: "_Sender") -> None:
        if self._server.pool is None or not self._operation.of_model:
            await self._reply(call, arguments, sender)
            return
        async with of_model(call, *arguments):
            await self._reply(call, arguments, sender)

    async def _reply(self, call: Call, arguments: list[Any], sender: "_Sender") -> None:
        # A request without input may let a model go, and needs none for that.
        asks_nothing = any(getattr(each, "asks_nothing", False) for each in arguments)
        if self._operation.generates and not asks_nothing:
            call.server.metrics.count("received")
            check_task(call.server.engine.info, wants_pooled=False)
        reply = await self._operation.handler(call, *arguments)
        match reply:
            case Reply():
                await sender.whole(reply)
            case FileReply():
                await self._send_file(reply, sender)
            case EventStream():
                call.is_streamed = True
                await self._stream(call, reply, sender)

    async def _unless(
        self, leaving: Coroutine[Any, Any, None], answering: Coroutine[Any, Any, None]
    ) -> None:
        """Answer, unless the client goes away first or the server ends; then the work is cancelled.

        Raises:
            ClientDisconnectedError: the client went away.
            EngineUnavailableError: the server ends.
        """
        work = asyncio.create_task(answering)
        gone = asyncio.create_task(leaving)
        self._server.open_requests.add(gone)
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                if gone.cancelled():
                    raise EngineUnavailableError(SHUTTING_DOWN)
                raise ClientDisconnectedError
            await work
        finally:
            self._server.open_requests.discard(gone)
            gone.cancel()
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work

    async def _stream(self, call: Call, stream: EventStream, sender: "_Sender") -> None:
        """The head goes out with the first event, so that an early error has its own status."""
        sender.is_lines = stream.is_lines
        if sender.is_head:  # a stream need not have an end, for which the connection would wait
            await stream.events.aclose()
            await sender.end()
            return
        ping_s = math.inf if stream.is_lines else self._server.config.ping_s
        pings = asyncio.create_task(sender.ping(stream.ping, ping_s), name="ridgeline-ping")
        try:
            async with contextlib.aclosing(stream.events):
                async for data in stream.events:
                    await sender.event(data)
            await sender.end()
        except HandedOverError:
            await sender.event(HANDED_OVER)
            await sender.end()
        finally:
            pings.cancel()

    async def _send_file(self, reply: FileReply, sender: "_Sender") -> None:
        file = await asyncio.to_thread(reply.open)
        try:
            data = await asyncio.to_thread(file.read, _FILE_CHUNK_BYTES)
            await sender.start(
                200, [(b"content-type", reply.content_type.encode()), *reply.headers]
            )
            while data:
                await sender.body(data)
                data = await asyncio.to_thread(file.read, _FILE_CHUNK_BYTES)
            await sender.end()
        finally:
            file.close()

    async def _fail(self, call: Call, sender: "_Sender", error: Exception) -> None:
        api_error = to_api_error(error, call.prompt_field)
        call.outcome, call.problem = f"error {api_error.status}", api_error.summary
        if self._operation.generates and (api_error.status == 429 or api_error.status >= 500):
            call.server.metrics.count("failed")
        if not isinstance(error, ApiError | RidgelineError):
            _log.error("A request failed inside.", exc_info=error)
        elif api_error.status == 500:
            _log.error("Request %s failed: %s", call.request_id, error)
        body = api_error.body(self._operation.family, call.request_id)
        with contextlib.suppress(OSError):
            if not sender.started:
                await sender.whole(
                    Reply(body=body, status=api_error.status, headers=tuple(api_error.headers))
                )
            elif sender.is_stream:
                last = error_event(body, self._operation.family)
                await sender.event(encode(body) + b"\n" if sender.is_lines else last)
                await sender.end()


class _Sender:
    """Writes one response."""

    def __init__(self, send: Send, *, is_head: bool) -> None:
        self._send = send
        self.is_head = is_head
        self._lock = asyncio.Lock()
        self._last_s = time.monotonic()
        self.started = self.ended = self.is_stream = self.is_lines = False

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def whole(self, reply: Reply) -> None:
        data = reply.encoded()
        headers = [
            (b"content-type", reply.content_type.encode()),
            (b"content-length", str(len(data)).encode()),
            *reply.headers,
        ]
        await self.start(reply.status, headers)
        await self.body(data, more=False)
        self.ended = True

    async def event(self, data: bytes) -> None:
        """Send a piece of an event stream, after the head if it is the first."""
        async with self._lock:
            if not self.started:
                self.is_stream = True
                await self._start_stream()
            await self.body(data)
            self._last_s = time.monotonic()

    async def end(self) -> None:
        async with self._lock:
            if not self.started:
                await self._start_stream()
            self.ended = True
            await self.body(b"", more=False)

    async def _start_stream(self) -> None:
        await self.start(200, [(b"content-type", _STREAM_TYPES[self.is_lines]), *_STREAM_HEADERS])

    async def ping(self, data: bytes, every_s: float) -> None:
        """Break the silence, so that proxies and readers know that the connection lives."""
        while every_s < math.inf:
            wait_s = self._last_s + every_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            elif self.ended:
                return
            else:
                await self.event(data)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> None:
    await asyncio.Event().wait()
