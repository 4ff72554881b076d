"""`AsyncEngine`: the engine of a server."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from types import TracebackType
from typing import Self

from ridgeline.core import errors
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineError, EngineUnavailableError, InvalidRequestError
from ridgeline.core.request import CompletionChunk, GenerateRequest, Request
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.engine.client import Embedding, EngineClient, PinnedPrefix
from ridgeline.engine.info import EngineInfo
from ridgeline.engine.loading import Progress
from ridgeline.engine.messages import (
    Abort,
    Add,
    Deleted,
    DeleteTenant,
    Event,
    Explain,
    Explained,
    Failed,
    Lost,
    Output,
    Pin,
    Pinned,
    Pooled,
    Profiled,
    Refused,
    Reply,
    Report,
    Started,
    StartProfile,
    StopProfile,
    Unpin,
)
from ridgeline.engine.process_host import ProcessHost
from ridgeline.engine.prompts import encode_prompt
from ridgeline.engine.request_factory import RequestFactory
from ridgeline.engine.stats import EngineStats, EngineStatus, Health, StepRecord
from ridgeline.engine.streams import RequestStream
from ridgeline.engine.thread_host import ThreadHost
from ridgeline.kvcache import MissReport

_KEPT_STEPS = 4096
_LONG_TEXT_CHARS = 2048  # tokenized off the event loop
_DRAIN_POLL_S = 0.01
_PIN_TRIES = 3


class AsyncEngine(EngineClient):
    """Generates for many callers at once, in one event loop.

    The model runs in a child process, or with ``in_process`` in a thread of this one. A child that
    dies is started again, and requests go on in the new one, once; those of several samples that
    had output fail. Nothing that a reader does, or leaves undone, holds back another: what waits
    for a slow reader is merged and its request goes on.

    Args:
        config: what to load, and how to run it.
        in_process: run the model in a thread of this process; then nothing restarts it.
        progress: called with (bytes done, bytes in all, label) while weights load (in a thread).

    Every method is called in the event loop in which `start` was awaited.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        in_process: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self._host = ThreadHost(config, progress) if in_process else ProcessHost(config, progress)
        self._info: EngineInfo | None = None
        self._requests: RequestFactory | None = None
        self._streams: dict[int, RequestStream] = {}
        self._numbers: dict[str, int] = {}  # the callers' ids of open requests
        self._deletions: set[str] = set()  # tenants; the worker has not said that they are done
        self._asked: dict[int, asyncio.Future[Reply]] = {}
        self._pins: dict[int, tuple[PinnedPrefix, int]] = {}  # with its number in the worker
        self._num_pins = 0  # ever made: the worker's numbers begin again when it does
        self._num_profiles = 0
        self._closing: Health | None = None
        self._stats = EngineStats()
        self._steps: deque[StepRecord] = deque(maxlen=_KEPT_STEPS)
        self._started: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Load the model and begin to serve.

        Raises:
            ModelFileError: it is missing, damaged or not supported.
            MachineError: no network, disk or memory for it.
        """
        self._started = asyncio.get_running_loop().create_future()
        await self._host.start(self._on_event)
        await self._started

    def generate(self, request: GenerateRequest) -> AsyncIterator[CompletionChunk]:
        return self._generate(request)

    async def _generate(self, wanted: GenerateRequest) -> AsyncIterator[CompletionChunk]:
        token_ids = await self._encode(wanted.prompt)
        request = self._factory().build(
            token_ids,
            wanted.params,
            adapter=wanted.adapter,
            cache_salt=wanted.cache_salt,
            tenant=wanted.tenant,
            priority=wanted.priority,
            deadline_s=wanted.deadline_s,
            arrival_s=wanted.arrival_s,
            seed=wanted.seed,
            output_token_ids=wanted.output_token_ids,
            first_sample=wanted.first_sample,
            expected_token_ids=wanted.expected_token_ids,
        )
        stream = self._open(wanted.request_id, request, wanted.cache_salt)
        try:
            async for chunk in stream.chunks():
                yield chunk
        finally:
            self._close(wanted.request_id, stream)

    async def embed(
        self,
        prompt: str | tuple[int, ...],
        *,
        request_id: str,
        adapter: str | None = None,
        cache_salt: str = "",
        tenant: str = "",
        priority: int = 0,
        second_start: int | None = None,
    ) -> Embedding:
        token_ids = await self._encode(prompt)
        request = self._factory().build(
            token_ids,
            SamplingParams(max_tokens=1),
            adapter=adapter,
            cache_salt=cache_salt,
            tenant=tenant,
            priority=priority,
            wants_pooled=True,
            second_start=second_start,
        )
        stream = self._open(request_id, request, cache_salt)
        try:
            async for _ in stream.chunks():
                pass
        finally:
            self._close(request_id, stream)
        if stream.vector is None:
            raise EngineUnavailableError("The request was aborted.")
        return Embedding(vector=stream.vector, num_tokens=len(token_ids))

    async def abort(self, request_id: str) -> None:
        number = self._numbers.get(request_id)
        if number is None:
            return
        self._streams[number].abort()
        self._host.send(Abort(number=number))

    async def delete_tenant(self, tenant: str) -> None:
        self._deletions.add(tenant)
        self._pins = {n: pin for n, pin in self._pins.items() if pin[0].tenant != tenant}
        self._host.send(DeleteTenant(tenant=tenant))

    async def pin_prefix(
        self,
        token_ids: tuple[int, ...],
        *,
        request_id: str,
        adapter: str | None = None,
        cache_salt: str = "",
        tenant: str = "",
        priority: int = 0,
    ) -> PinnedPrefix:
        request = self._prefix_request(token_ids, adapter, cache_salt, tenant)
        if len(token_ids) < (least := self.config.block_tokens):
            raise InvalidRequestError(f"A pinned prefix has {least} tokens or more, a KV block.")
        wanted = GenerateRequest(
            request_id=request_id,
            prompt=token_ids,
            params=request.params,
            adapter=adapter,
            cache_salt=cache_salt,
            tenant=tenant,
            priority=priority,
        )
        for tries_left in reversed(range(_PIN_TRIES)):
            async for _ in self.generate(wanted):
                pass
            request = self._prefix_request(token_ids, adapter, cache_salt, tenant)  # of this engine
            try:
                found = await self._ask(request.request_id, Pin(request=request))
                break
            except errors.OverloadedError:
                if not tries_left:
                    raise
        assert isinstance(found, Pinned)
        pin = PinnedPrefix(
            number=self._num_pins,
            num_tokens=found.num_tokens,
            tenant=tenant,
            adapter=adapter,
            cache_salt=cache_salt,
        )
        self._num_pins += 1
        self._pins[pin.number] = pin, found.prefix
        return pin

    def unpin_prefix(self, number: int) -> None:
        if number not in self._pins:
            raise InvalidRequestError(f"No prefix of the number {number} is pinned.")
        self._host.send(Unpin(prefix=self._pins.pop(number)[1]))

    @property
    def pinned_prefixes(self) -> tuple[PinnedPrefix, ...]:
        return tuple(pin for pin, _ in self._pins.values())

    async def explain_miss(
        self, token_ids: tuple[int, ...], *, adapter: str | None = None, cache_salt: str = ""
    ) -> MissReport:
        request = self._prefix_request(token_ids, adapter, cache_salt, "")
        found = await self._ask(request.request_id, Explain(request=request))
        assert isinstance(found, Explained)
        return found.report

    def _prefix_request(
        self, token_ids: tuple[int, ...], adapter: str | None, cache_salt: str, tenant: str
    ) -> Request:
        if not self.config.enable_prefix_caching:
            raise InvalidRequestError("There is no prefix cache: enable_prefix_caching.")
        return self._factory().build(
            token_ids,
            SamplingParams(max_tokens=1),
            adapter=adapter,
            cache_salt=cache_salt,
            tenant=tenant,
        )

    async def _ask(self, number: int, question: Pin | Explain | StartProfile) -> Reply:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._host.send(question)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._let_go(answer.result())
            raise
        finally:
            del self._asked[number]

    def _let_go(self, answer: Reply) -> None:
        """Nobody waits for it any more."""
        if isinstance(answer, Pinned):
            self._host.send(Unpin(prefix=answer.prefix))

    def _answer(self, number: int, answer: Reply | errors.RidgelineError) -> None:
        future = self._asked.get(number)
        if future is None or future.done():
            if not isinstance(answer, errors.RidgelineError):
                self._let_go(answer)
        elif isinstance(answer, errors.RidgelineError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    async def profile(self, num_steps: int, *, timeout_s: float, by_layer: bool = False) -> bytes:
        self._factory()
        self._num_profiles += 1
        number = -self._num_profiles  # no request has it
        question = StartProfile(number=number, num_steps=num_steps, by_layer=by_layer)
        answer = asyncio.create_task(self._ask(number, question))
        try:
            await asyncio.wait((answer,), timeout=timeout_s)
        finally:  # cancelled, perhaps
            if not answer.done():
                self._host.send(StopProfile(number=number))
        found = await answer
        assert isinstance(found, Profiled)
        return found.profile

    def health(self) -> Health:
        return self._closing or self._host.health

    @property
    def worker_pid(self) -> int | None:
        """The process in which the model runs now."""
        return self._host.pid

    def stats(self) -> EngineStats:
        return replace(self._stats, steps=tuple(self._steps))

    async def shutdown(self, drain_s: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        self._closing = Health(status=EngineStatus.DRAINING, reason="The engine is shutting down.")
        deadline_s = loop.time() + drain_s
        while self._streams and loop.time() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        for stream in list(self._streams.values()):
            stream.abort()
        await self._host.stop()
        self._closing = self._host.health

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailableError("The model is not loaded yet.")
        return self._info

    @property
    def num_open_requests(self) -> int:
        return len(self._streams)

    def _factory(self) -> RequestFactory:
        health = self.health()
        if not health.is_ready:
            raise EngineUnavailableError(health.reason)
        assert self._requests is not None
        return self._requests

    async def _encode(self, prompt: str | tuple[int, ...]) -> list[int]:
        info = self.info
        arguments = (prompt, info.tokenizer, info.config.max_model_len)
        if isinstance(prompt, str) and len(prompt) > _LONG_TEXT_CHARS:
            return await asyncio.to_thread(encode_prompt, *arguments)
        return encode_prompt(*arguments)

    def _open(self, request_id: str, request: Request, cache_salt: str) -> RequestStream:
        if request_id in self._numbers:
            raise InvalidRequestError("A request with this id is in progress.")
        stream = RequestStream(request, cache_salt=cache_salt)
        self._host.send(Add(request=request))
        self._streams[request.request_id] = stream
        self._numbers[request_id] = request.request_id
        return stream

    def _close(self, request_id: str, stream: RequestStream) -> None:
        if not stream.is_finished:
            self._host.send(Abort(number=stream.request.request_id))
        self._streams.pop(stream.request.request_id, None)
        self._numbers.pop(request_id, None)

    def _on_event(self, event: Event) -> None:
        match event:
            case Output(chunks=chunks):
                for chunk in chunks:
                    stream = self._streams.get(chunk.request_id)
                    if stream is not None and not stream.is_finished:
                        stream.put(chunk)
                        if stream.is_overfull:
                            self._end_slow(stream)
            case Report(stats=stats):
                self._steps.extend(stats.steps)
                self._stats = replace(stats, num_restarts=self._host.num_restarts)
            case Pooled(number=number, vector=vector):
                if number in self._streams:
                    self._streams[number].put_vector(vector)
            case Pinned(number=number) | Explained(number=number) | Profiled(number=number):
                self._answer(number, event)
            case Deleted(tenant=tenant):
                self._deletions.discard(tenant)
            case Refused(number=number, error=error, message=message, retry_after_s=retry_after_s):
                failure = _to_error(error, message, retry_after_s)
                if number in self._streams:
                    self._streams[number].fail(failure)
                self._answer(number, failure)
            case Started():
                self._on_started()
            case Lost(message=message):
                self._on_lost(message)
            case Failed(error=error, message=message):
                self._on_failed(_to_error(error, message))

    def _on_started(self) -> None:
        """Also after a restart, which may have loaded other weights: keys of cached KV follow."""
        self._info = self._host.info()
        if self._requests is None:
            self._requests = RequestFactory(self._info)
        self._requests.renew(self._info)
        if self._started is not None and not self._started.done():
            self._started.set_result(None)
        for tenant in self._deletions:
            self._host.send(DeleteTenant(tenant=tenant))
        for stream in self._streams.values():
            if not stream.is_finished:
                stream.request = self._requests.renewed(
                    stream.request, cache_salt=stream.cache_salt
                )
                self._host.send(Add(request=stream.request))

    def _end_slow(self, stream: RequestStream) -> None:
        """A reader who leaves many log-probabilities waiting must not fill the memory."""
        if not stream.is_finished:
            self._host.send(Abort(number=stream.request.request_id))
        stream.fail(EngineError("The reader is too slow for the log-probabilities it asked for."))

    def _on_lost(self, reason: str) -> None:
        """Every request is sent once more, since one of them may be the cause, and goes on from
        what it has; several samples with output cannot, and fail."""
        self._pins.clear()
        for number in self._asked:
            self._answer(number, EngineUnavailableError(f"{reason} The request was lost."))
        for stream in self._streams.values():
            if stream.num_retries or (stream.has_output and not stream.can_go_on):
                stream.fail(EngineError(f"{reason} The request was lost."))
            elif stream.has_output:
                stream.go_on()
            stream.num_retries += 1

    def _on_failed(self, error: errors.RidgelineError) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        for number in self._asked:
            self._answer(number, EngineUnavailableError(str(error)))
        for stream in self._streams.values():
            stream.fail(EngineUnavailableError(str(error)))


def _to_error(name: str, message: str, retry_after_s: float | None = None) -> errors.RidgelineError:
    if retry_after_s is not None:
        return errors.OverloadedError(message, retry_after_s=retry_after_s)
    kind = getattr(errors, name, EngineError)
    assert issubclass(kind, errors.RidgelineError)
    return kind(message)
