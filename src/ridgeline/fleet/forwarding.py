"""One request on its way through the router: sent, sent again, gone on with elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ridgeline.fleet.engines import RoutedEngine
from ridgeline.fleet.handing_over import SentTo
from ridgeline.fleet.load import TrackedRequest
from ridgeline.fleet.requests import RoutedRequest, end_to_end
from ridgeline.fleet.router import Router
from ridgeline.fleet.stream_log import StreamLog
from ridgeline.fleet.upstream import UNREADABLE, AnswerHead, Attempt, UpstreamError
from ridgeline.server.errors import ApiError, family_of
from ridgeline.server.replies import DONE, encode, error_event

Send = Callable[[Any], Awaitable[None]]
EVENTS = b"text/event-stream"
_LINES = b"application/x-ndjson"
MOST_WHOLE_BYTES = 4 << 20  # of an answer that is kept until it is whole
_MOST_CONTINUATIONS = 16
_MOST_TRIES = 8
_SOON_S = 0.5  # for a probe to say that an engine is there after all
_PASSING_ERRORS = ("api_error", "overloaded_error", "rate_limit_error")  # elsewhere they may not be
_NONE_UP = "No engine takes requests now."
_RETRY_AFTER_S = 1.0
_LIMIT_OF_KEY = b'"rate_limit_exceeded"'


@dataclass(slots=True)
class ForwardedTimes:
    """When the first byte of a stream came, how many tokens an answer has if that is known, and how
    many requests its engine ran with it."""

    first_s: float | None = None
    output_tokens: int = 0
    num_running: int = 1
    engine: RoutedEngine | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_ANSWERS = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A whole answer of an engine."""

    head: AnswerHead
    body: bytes


class Client:
    """Whoever asked: `send` is ASGI's; the pieces of a stream go past it, to the transport.

    ``added``: headers that an answer gets beside its own.
    """

    added: Sequence[tuple[bytes, bytes]] = ()

    def __init__(self, scope: Any, send: Send) -> None:
        self._send = send
        self._transport, self._flow = scope["extensions"]["ridgeline.connection"]
        self._is_chunked = scope["http_version"] == "1.1"
        self.has_begun = False

    async def begin(self, head: AnswerHead, engine: RoutedEngine) -> None:
        """Send the head of an answer whose length is not known."""
        await self._send({"type": "http.response.start", "status": head.status,
                          "headers": [*answer_headers(head, engine), *self.added]})  # fmt: skip
        self.has_begun = True

    def write(self, data: bytes) -> bool:
        """Send a piece of the body; returns whether more is wanted now."""
        if data:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        return not self._flow.write_paused

    async def drain(self) -> None:
        """Wait until more is wanted."""
        await self._flow.drain()

    def break_off(self) -> None:
        """Let the client see that there is no end: of chunks it is the end that is missing."""
        self._transport.close() if self._is_chunked else self._transport.abort()

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send an answer in one piece."""
        headers = [*headers, *self.added, (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.has_begun = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


class Forwarding:
    """Sends a request to one engine after another, until there is a whole answer.

    Before the first byte of an answer it is sent anew; a stream of events goes on from what the
    client has, also where one engine computes the prompt for another. What cannot go on ends with
    an error.
    """

    def __init__(self, router: Router, request: RoutedRequest, client: Client) -> None:
        self._router, self._request, self._client = router, request, client
        self._log = StreamLog()
        self._tried: list[RoutedEngine] = []
        self._refusal: WholeAnswer | None = None  # the last answer that another engine may not give
        self._num_continuations = 0
        self._broken_s: float | None = None  # since when the stream waits for an engine
        self._refusing: list[RoutedEngine] = []  # since the last pause, to go on with the stream
        self._source: RoutedEngine | None = None  # has computed the prompt, for another
        self.outcome = "completed"
        self.is_overload = False  # refused, as no engine has room for it
        self.times = ForwardedTimes()

    async def run(self) -> None:
        """Answer the client, whatever becomes of engines."""
        self._router.budget.request()
        while (placed := await self._next()) is not None:
            try:
                if await self._try(placed):
                    return
            except UpstreamError as error:
                self._source = None
                if not await self._is_worth_more(str(error)):
                    return
            self._tried.append(placed.engine)
        await self._give_up(_NONE_UP)

    async def _next(self) -> SentTo | None:
        """The next to be asked; where none takes requests, the first that does again, soon enough.

        A stream that has begun waits longer than a request that may be refused: once all engines
        have refused to go on with it, they are asked again after a pause.
        """
        router, request = self._router, self._request
        has_begun = self._broken_s is not None
        if not has_begun and len(self._tried) >= _MOST_TRIES:
            return None
        if self._source is not None:
            engine = router.next_after(request, self._source)
        elif has_begun:
            engine = router.choose(request, self._tried[-1:] + self._refusing)
        else:
            placed = router.place(request, self._tried)
            if placed is not None or self._refusal is not None:
                return placed
            engine = None
        if engine is not None:
            return SentTo(engine=engine)
        now_s = asyncio.get_running_loop().time()
        until_s = (self._broken_s or now_s) + (router.config.recover_s if has_begun else _SOON_S)
        if self._refusing:
            if now_s >= until_s:
                return None
            self._refusing.clear()
            await asyncio.sleep(min(_RETRY_AFTER_S, until_s - now_s))
        engine = await router.wait_for(request, until_s)
        return None if engine is None else SentTo(engine=engine)

    async def _try(self, placed: SentTo) -> bool:
        """Whether the client has its answer.

        Raises:
            UpstreamError: the engine is lost.
        """
        request, engine = self._request, placed.engine
        state = None if self._log.is_empty else encode(self._log.state())
        with engine.tracked(request, is_computed=self._source is not None) as tracked:
            try:
                attempt = await engine.pool.send(
                    request.encoded(self._router.token, state, hands_over=placed.hands_over),
                    is_head=request.method == "HEAD",
                )
            except UpstreamError as error:
                engine.lost(error)
                raise
            engine.attempts.add(attempt)
            try:
                return await self._answer(placed, attempt, tracked)
            except UpstreamError as error:
                engine.lost(error)
                raise
            finally:
                engine.attempts.discard(attempt)
                attempt.close()

    async def _answer(self, placed: SentTo, attempt: Attempt, tracked: TrackedRequest) -> bool:
        engine, loop = placed.engine, asyncio.get_running_loop()
        sent_s = loop.time()
        try:
            async with asyncio.timeout(self._router.config.answer_timeout_s):
                head = await attempt.head
        except TimeoutError:
            raise UpstreamError("The engine has not answered in time.") from None
        tracked.start()
        fields = head.fields
        is_events = fields.get(b"content-type", b"").startswith(EVENTS)
        if head.status == 200 and is_events:
            if placed.alone_s and self._router.handing_over is not None:
                roles = self._router.handing_over.roles
                roles.note_seconds(placed.alone_s, loop.time() - sent_s)
            return await self._stream(engine, attempt, head)
        length = fields.get(b"content-length", b"0" if self._request.method == "HEAD" else b"")
        is_short = length.isdigit() and int(length) <= MOST_WHOLE_BYTES
        if not (is_short or _may_be_others(head.status) or self._client.has_begun):
            return await self._pass_on(engine, attempt, head)
        return await self._judge(engine, WholeAnswer(head, await attempt.whole(MOST_WHOLE_BYTES)))

    async def _judge(self, engine: RoutedEngine, answer: WholeAnswer) -> bool:
        """Whether a whole answer is the client's; else another engine is asked."""
        status = answer.head.status
        if status in (500, 502, 504):
            engine.breaker.fail()
        else:
            engine.breaker.succeed()
        if status == 503:
            wait = answer.head.fields.get(b"retry-after", b"")
            wait_s = min(float(wait), 60.0) if wait.isdigit() else _RETRY_AFTER_S
            engine.not_before_s = asyncio.get_running_loop().time() + wait_s
        if _may_be_others(status):
            self._refusal = answer
            if self._client.has_begun:
                self._source = None  # any engine may go on
                self._refusing.append(engine)
                return False
            if self._may_send_again(engine):
                return False
        if self._client.has_begun:
            await self._give_up("The stream could not go on.")
            return True
        if status >= 400:
            self.outcome = "refused"
            self.is_overload = _may_be_others(status) and _LIMIT_OF_KEY not in answer.body
        elif self._request.generates and self._router.config.max_replicas is not None:
            self.times.output_tokens = _num_tokens(answer.body)
        await self._client.whole(status, answer_headers(answer.head, engine), answer.body)
        return True

    def _note_engine(self, engine: RoutedEngine) -> None:
        self.times.engine, self.times.num_running = engine, engine.tracker.num_running

    def _may_send_again(self, refusing: RoutedEngine) -> bool:
        """After an answer that another engine may not give; there is a budget for that."""
        has_other = self._router.choose(self._request, [*self._tried, refusing]) is not None
        if not (has_other and self._request.may_repeat and self._router.budget.take()):
            return False
        self._router.retries.inc()
        return True

    async def _stream(self, engine: RoutedEngine, attempt: Attempt, head: AnswerHead) -> bool:
        """Pass events on, and remember what the client has."""
        client, log = self._client, self._log
        if self._broken_s is not None:
            self._broken_s = None
            self._refusing.clear()
            moved = self._router.continuations
            (moved if self._source is None else self._router.handovers).inc()
            self._source = None
        attempt.may_not_fall_silent = True
        await attempt.begun
        engine.breaker.succeed()
        if self.times.first_s is None:
            self.times.first_s = asyncio.get_running_loop().time()
        if not client.has_begun:
            await client.begin(head, engine)
        resuming: list[asyncio.Task[None]] = []

        def take(data: bytes) -> None:
            if not client.write(log.take(data)) and not resuming:
                resuming.append(asyncio.create_task(self._resume(attempt, resuming)))

        try:
            attempt.attach(take)
        except ValueError as error:
            raise UpstreamError(str(error)) from None
        await attempt.ended
        if log.is_handed_over:
            log.is_handed_over = False
            if not (log.is_empty or log.can_go_on):
                await self._give_up("The stream cannot go on: its events cannot be read.")
                return True
            self._source, self._broken_s = engine, asyncio.get_running_loop().time()
            return False
        self.times.output_tokens = log.num_marks
        self._note_engine(engine)
        if self._router.handing_over is not None and log.num_tokens:
            self._router.handing_over.roles.note_output(log.num_tokens)
        if log.error is not None:
            if _may_pass(log.error):
                raise UpstreamError("The engine failed.")
            client.write(log.error)
            self.outcome = "failed"
        await client.end()
        return True

    async def _resume(self, attempt: Attempt, resuming: list[asyncio.Task[None]]) -> None:
        """Read no more from the engine until the client has read."""
        attempt.pause()
        await self._client.drain()
        resuming.clear()
        attempt.resume()

    async def _pass_on(self, engine: RoutedEngine, attempt: Attempt, head: AnswerHead) -> bool:
        """Pass on an answer that is too long to keep, or whose length is not known."""
        engine.breaker.succeed()
        if head.status >= 400:
            self.outcome = "refused"
        await self._client.begin(head, engine)
        resuming: list[asyncio.Task[None]] = []
        ends_line = True

        def take(data: bytes) -> None:
            nonlocal ends_line
            ends_line = data.endswith(b"\n")
            if not self._client.write(data) and not resuming:
                resuming.append(asyncio.create_task(self._resume(attempt, resuming)))

        attempt.attach(take)
        try:
            await attempt.ended
        except UpstreamError as error:
            engine.lost(error)
            self.outcome = "failed"
            if not (ends_line and head.fields.get(b"content-type", b"").startswith(_LINES)):
                self._client.break_off()
                return True
            self._client.write(self._error_body(_unavailable(str(error))) + b"\n")
        await self._client.end()
        return True

    async def _is_worth_more(self, reason: str) -> bool:
        """After an engine was lost: whether to ask another one. If not, the client is told."""
        if not self._client.has_begun:
            if self._request.may_repeat:  # a lost connection is no sign of overload: no budget
                self._router.retries.inc()
                return True
            await self._give_up(f"{reason} It is not known whether the request was carried out.")
            return False
        log = self._log
        if log.is_done or log.lacks_only_the_end:
            self._client.write(b"" if log.is_done else DONE)
            await self._client.end()
            return False
        if not (log.is_empty or (log.can_go_on and self._request.is_continued)):
            await self._give_up(reason)
            return False
        if self._num_continuations == _MOST_CONTINUATIONS:
            await self._give_up("The stream was broken off too often.")
            return False
        self._num_continuations += 1
        log.drop_half()
        if self._broken_s is None:
            self._broken_s = asyncio.get_running_loop().time()
        return True

    def _error_body(self, error: ApiError) -> bytes:
        return encode(error.body(family_of(self._request.path), ""))

    async def _give_up(self, reason: str) -> None:
        """Tell the client, in the stream if it has begun."""
        self.outcome = "failed"
        if self._refusal is not None and not self._client.has_begun:
            answer = self._refusal
            headers = end_to_end(answer.head.headers)
            await self._client.whole(answer.head.status, headers, answer.body)
            return
        error, family = _unavailable(reason), family_of(self._request.path)
        body = error.body(family, "")
        if self._client.has_begun:
            self._client.write(error_event(body, family))
            await self._client.end()
        else:
            content_type = (b"content-type", b"application/json")
            await self._client.whole(503, [content_type, *error.headers], encode(body))


def _unavailable(reason: str) -> ApiError:
    return ApiError(503, reason, code="unavailable", retry_after_s=_RETRY_AFTER_S)


def _may_be_others(status: int) -> bool:
    """Whether another engine may answer otherwise."""
    return status == 429 or status >= 500


def answer_headers(head: AnswerHead, engine: RoutedEngine) -> list[tuple[bytes, bytes]]:
    """Those that a client gets."""
    return [*end_to_end(head.headers), (b"x-ridgeline-engine", engine.name.encode())]


def _num_tokens(body: bytes) -> int:
    """Of an answer's outputs, if it says so."""
    try:
        usage = _ANSWERS.decode(body).usage or _Usage()
    except UNREADABLE:
        return 0
    return usage.completion_tokens or usage.output_tokens


class _Error(msgspec.Struct):
    type: str = ""


class _ErrorEvent(msgspec.Struct):
    error: _Error


def _may_pass(event: bytes) -> bool:
    """Whether an error in a stream need not be one at another engine."""
    line = event.split(b"\n", 1)[0].removeprefix(b"data: ")
    try:
        return msgspec.json.decode(line, type=_ErrorEvent).error.type in _PASSING_ERRORS
    except UNREADABLE:
        return False
