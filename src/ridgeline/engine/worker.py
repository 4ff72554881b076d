"""The side of an `AsyncEngine` that owns the model: takes commands, runs steps, sends events."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import msgspec

from ridgeline.core.errors import (
    EngineError,
    InvalidRequestError,
    OverloadedError,
    RidgelineError,
)
from ridgeline.core.protocols import Grammar
from ridgeline.core.request import CompletionChunk, Request
from ridgeline.engine.engine import Engine
from ridgeline.engine.grammar_gate import GrammarGate
from ridgeline.engine.messages import (
    Abort,
    Add,
    Command,
    Deleted,
    DeleteTenant,
    Event,
    Explain,
    Explained,
    Failed,
    Output,
    Pin,
    Pinned,
    Pooled,
    Profiled,
    Refused,
    Report,
    Started,
    StartProfile,
    Stop,
    StopProfile,
    Unpin,
)
from ridgeline.engine.profiling import profile_of, record, stop_recording
from ridgeline.engine.request_state import RequestState
from ridgeline.executors.recorder import Recording

_log = logging.getLogger(__name__)

_REPORT_EVERY_S = 0.1
_IDLE_S = 1.0
_POLL_S = 0.005  # between looks at what other threads do


class Receive(Protocol):
    """Takes the commands that have come; waits for one at the most so long."""

    def __call__(self, *, wait_s: float) -> Sequence[Command]: ...


class Worker:
    """Serves one `Engine` in the thread that calls `run`; ``send`` must not block."""

    def __init__(self, engine: Engine, receive: Receive, send: Callable[[Event], None]) -> None:
        self._engine = engine
        self._loop = engine.loop
        self._receive = receive
        self._send = send
        self._pooling: dict[int, RequestState] = {}
        self._gate = GrammarGate(engine.grammars, engine.scheduler.config.max_num_waiting)
        self._num_deletions = 0  # that were begun and have not been reported
        self._deleted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._num_profiles = 0  # that were begun and have not been sent
        self._profile = 0  # the number of the last one
        self._profiled: queue.SimpleQueue[tuple[int, bytes | RidgelineError]] = queue.SimpleQueue()
        self._running = True
        self._reported_s = 0.0
        self._is_behind = False  # with pricing steps, which is done when there is no work

    def run(self) -> Failed | None:
        """Serve until told to stop, or until the engine fails; then the engine is closed."""
        info = self._engine.info
        self._send(Started(config=info.config, kv_digest=info.kv_digest, summary=info.summary))
        try:
            while self._running:
                self._turn()
        except EngineError as error:
            return Failed(error="EngineError", message=str(error))
        except Exception as error:  # a defect of ours: whoever waits must hear of it
            _log.exception("The engine failed.")
            return Failed(error="EngineError", message=f"The engine failed: {error!r}")
        finally:
            self._gate.close()
            self._engine.close()
        return None

    def _turn(self) -> None:
        idle_s = 0.0 if self._is_behind else _IDLE_S
        wait_s = self._loop.wait_s if self._loop.has_work else idle_s
        if self._gate or self._num_deletions or self._num_profiles:
            wait_s = min(wait_s, _POLL_S)
        for command in self._receive(wait_s=wait_s):
            self._handle(command)
        for request, outcome in self._gate.released():
            if isinstance(outcome, RidgelineError):
                self._refuse(request.request_id, outcome)
            else:
                self._add(request, outcome)
        while not self._deleted.empty():
            self._num_deletions -= 1
            self._send(Deleted(tenant=self._deleted.get()))
        self._send_profiles()
        if self._loop.has_work:
            chunks = list(self._loop.step())
            if self._pooling:
                chunks = [chunk for chunk in chunks if not self._end_pooled(chunk)]
            if chunks:
                self._send(Output(chunks=chunks))
        else:
            self._loop.idle()
        now = time.monotonic()
        if now - self._reported_s >= _REPORT_EVERY_S or not self._loop.has_work:
            self._reported_s = now
            stats = self._loop.stats()
            self._is_behind = stats.roofline is not None and stats.roofline.num_pending > 0
            self._send(Report(stats=stats))

    def _end_pooled(self, chunk: CompletionChunk) -> bool:
        """Send the vector of a request that wants one, or why there is none; False for others."""
        state = self._pooling.pop(chunk.request_id, None)
        if state is None:
            return False
        try:
            self._send(Pooled(number=chunk.request_id, vector=self._engine.head(state.pooled())))
        except RidgelineError as error:
            self._refuse(chunk.request_id, error)
        return True

    def _handle(self, command: Command) -> None:
        match command:
            case Add(request=request):
                try:
                    is_held = self._gate.holds(request)
                except OverloadedError as error:
                    self._refuse(request.request_id, error)
                    return
                if not is_held:
                    self._add(request)
            case Abort(number=number):
                self._gate.abort(number)
                self._pooling.pop(number, None)
                self._loop.abort(number)
            case DeleteTenant(tenant=tenant):
                self._num_deletions += 1
                done = partial(self._deleted.put, tenant)
                self._engine.scheduler.delete_tenant(tenant, done)
            case Pin(request=request):
                self._pin(request)
            case Unpin(prefix=prefix):
                with contextlib.suppress(InvalidRequestError):  # it went with its tenant
                    self._engine.scheduler.unpin(prefix)
            case Explain(request=request):
                assert request.cache_key is not None
                report = self._engine.scheduler.explain_miss(
                    request.cache_key, request.prompt_token_ids
                )
                self._send(Explained(number=request.request_id, report=report))
            case StartProfile():
                self._start_profile(command)
            case StopProfile(number=number):
                if number == self._profile:
                    stop_recording(self._engine)
            case Stop():
                self._running = False

    def _pin(self, request: Request) -> None:
        assert request.cache_key is not None
        try:
            prefix, num_tokens = self._engine.scheduler.pin_prefix(
                request.cache_key, request.prompt_token_ids, request.tenant
            )
        except RidgelineError as error:
            self._refuse(request.request_id, error)
        else:
            number = request.request_id
            self._send(Pinned(number=number, prefix=prefix, num_tokens=num_tokens))

    def _start_profile(self, command: StartProfile) -> None:
        """What is recorded is made sense of in a thread of its own, beside the next steps."""

        def make(recording: Recording) -> None:
            try:
                found = profile_of(self._engine, recording, by_layer=command.by_layer)
                self._profiled.put((command.number, msgspec.json.encode(found.to_json())))
            except RidgelineError as error:
                self._profiled.put((command.number, error))
            except Exception as error:  # whoever waits must hear of it
                _log.exception("A profile could not be made.")
                self._profiled.put((command.number, EngineError(type(error).__name__)))

        def start(recorded: Future[Recording]) -> None:
            threading.Thread(target=make, args=(recorded.result(),), daemon=True).start()

        try:
            recorded = record(self._engine, command.num_steps)
        except RidgelineError as error:
            self._refuse(command.number, error)
            return
        self._profile = command.number
        self._num_profiles += 1
        recorded.add_done_callback(start)

    def _send_profiles(self) -> None:
        while not self._profiled.empty():
            self._num_profiles -= 1
            number, found = self._profiled.get()
            if isinstance(found, RidgelineError):
                self._refuse(number, found)
            else:
                self._send(Profiled(number=number, profile=found))

    def _add(self, request: Request, grammar: Grammar | None = None) -> None:
        try:
            state = self._loop.add(request, grammar=grammar)
        except EngineError:
            raise
        except RidgelineError as error:
            self._refuse(request.request_id, error)
        except Exception as error:  # one request must not end the others
            _log.exception("A request could not be added.")
            self._refuse(request.request_id, EngineError(type(error).__name__))
        else:
            if request.pooling is not None:
                self._pooling[request.request_id] = state

    def _refuse(self, number: int, error: RidgelineError) -> None:
        self._send(
            Refused(
                number=number,
                error=type(error).__name__,
                message=str(error),
                retry_after_s=(error.retry_after_s if isinstance(error, OverloadedError) else None),
            )
        )
