"""`EngineLoop`: schedule, execute, update, detokenize; one step at a time."""

import time
from collections.abc import Sequence as Seq

from ridgeline.core.errors import EngineError
from ridgeline.core.plan import StepPlan
from ridgeline.core.protocols import Executor, StepHandle
from ridgeline.core.request import CompletionChunk, FinishReason, Request
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
        self._check_alive()
        if self._in_flight is None:
            plan = self._scheduler.schedule()
            if plan is None:
                return ()
            self._in_flight = (plan, self._executor.submit(plan), time.monotonic())
        plan, handle, started_s = self._in_flight
        try:
            result = handle.result()
        except Exception as error:
            self._failure = EngineError(f"The executor failed: {type(error).__name__}: {error}")
            raise self._failure from error
        self._in_flight = None
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

    def check_integrity(self) -> None:
        """Assert the scheduler's invariants; tests call it after every step."""
        self._scheduler.check_integrity()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
