"""`EngineLoop`: schedule, execute, update, detokenize; one step at a time."""

import threading
import time
from collections.abc import Sequence as Seq

from ridgeline.core.errors import EngineError
from ridgeline.core.plan import StepPlan
from ridgeline.core.protocols import Executor, StepHandle
from ridgeline.core.request import CompletionChunk, FinishReason, Request
from ridgeline.core.result import StepResult
from ridgeline.engine.interrupts import deferred_interrupts
from ridgeline.engine.request_state import RequestState
from ridgeline.scheduler import Scheduler
from ridgeline.text import Tokenizer


class EngineLoop:
    """Owns the requests in progress. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(
        self, executor: Executor, scheduler: Scheduler, tokenizer: Tokenizer | None
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._states: dict[int, RequestState] = {}
        self._failure: EngineError | None = None
        self._stepping = threading.Lock()
        # Kept until its result is here: Ctrl-C while waiting loses nothing.
        self._in_flight: tuple[StepPlan, StepHandle, float] | None = None

    def add(self, request: Request, prompt: str | None = None) -> RequestState:
        """Queue a request; its state fills as steps are run, and is the caller's to keep.

        Raises:
            ContextLengthError: it can never fit.
            EngineError: the engine failed before.
        """
        self._check_alive()
        sequences = self._scheduler.add(request)
        state = RequestState(request, sequences, self._tokenizer, prompt)
        self._states[request.request_id] = state
        return state

    def step(self) -> Seq[CompletionChunk]:
        """Run one step and return what it added to each sample.

        Raises:
            EngineError: the executor failed; every later call raises it again.
        """
        if not self._stepping.acquire(blocking=False):
            raise EngineError("The engine is used from two threads at once.")
        try:
            return self._step()
        finally:
            self._stepping.release()

    def _step(self) -> Seq[CompletionChunk]:
        self._check_alive()
        if self._in_flight is None:
            with deferred_interrupts():
                plan = self._scheduler.schedule()
                if plan is None:
                    return ()
                self._in_flight = (plan, self._executor.submit(plan), time.monotonic())
        plan, handle, started_s = self._in_flight
        try:
            result = handle.result()
        except Exception as error:
            self._failure = EngineError(f"The executor failed: {error}")
            raise self._failure from error
        with deferred_interrupts():
            self._in_flight = None
            return self._apply(plan, result, started_s)

    def _apply(self, plan: StepPlan, result: StepResult, started_s: float) -> Seq[CompletionChunk]:
        chunks = []
        for update in self._scheduler.update(plan, result):
            state = self._states[update.sequence.request.request_id]
            state.note_start(started_s)
            chunk, stopped = state.apply(update)
            if stopped:
                self._scheduler.finish(update.sequence, FinishReason.STOP)
            if chunk.token_ids or chunk.finish_reason:
                chunks.append(chunk)
        for request_id in {chunk.request_id for chunk in chunks if chunk.finish_reason}:
            if self._states[request_id].is_finished:
                del self._states[request_id]
        return chunks

    def abort(self, request_id: int) -> None:
        """End a request in any state; nothing happens if it has ended already."""
        state = self._states.pop(request_id, None)
        for sequence in state.sequences if state else ():
            self._scheduler.finish(sequence, FinishReason.ABORT)

    def close(self) -> None:
        """Refuse everything from now on."""
        self._failure = self._failure or EngineError("The engine is closed.")

    def check_integrity(self) -> None:
        """Assert the scheduler's invariants; tests call it after every step."""
        self._scheduler.check_integrity()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
