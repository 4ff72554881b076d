"""`EngineLoop`: schedule, execute, update, detokenize; one step at a time."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from ridgeline.core.errors import EngineError, InvalidRequestError
from ridgeline.core.plan import StepPlan
from ridgeline.core.protocols import Executor, Grammar, StepHandle
from ridgeline.core.request import CompletionChunk, FinishReason, Request
from ridgeline.core.result import StepResult
from ridgeline.engine.interrupts import InterruptGate
from ridgeline.engine.request_state import RequestState
from ridgeline.engine.stats import EngineStats, StepRecord
from ridgeline.roofline.live import RooflineReport
from ridgeline.scheduler import Scheduler, SequenceUpdate
from ridgeline.text import Tokenizer

_log = logging.getLogger(__name__)

_KEPT_STEPS = 256
_CATCH_UP_S = 0.02  # for pricing steps, when there is nothing else to do


class _StepInFlight(NamedTuple):
    plan: StepPlan
    handle: StepHandle
    started_s: float


class StepObserver(Protocol):
    """Is told of every step that was executed, and how long it took in seconds."""

    def observe(self, plan: StepPlan, result: StepResult, measured_s: float) -> None: ...

    def report(self, *, catch_up_s: float = ...) -> RooflineReport: ...


class EngineLoop:
    """Owns the requests in progress. Not thread-safe: one thread adds, steps and aborts."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        *,
        observer: StepObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._observer = observer
        self._clock = clock
        self.interrupts = InterruptGate()
        self._states: dict[int, RequestState] = {}
        self._dropped: deque[int] = deque()  # requests to abort before the next step
        self._failure: EngineError | None = None
        self._process = os.getpid()
        self._stepping = threading.Lock()
        # Kept until its result is here: Ctrl-C while waiting loses nothing.
        self._in_flight: deque[_StepInFlight] = deque()
        self._records: deque[StepRecord] = deque(maxlen=_KEPT_STEPS)
        self._prompt_tokens = self._generated_tokens = 0
        self._last_step_id, self._last_progress_s = 0, clock()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight)

    @property
    def wait_s(self) -> float:
        """Seconds until the next step may have something to do, for batches that fill up first."""
        return 0.0 if self._in_flight else self._scheduler.wait_s

    def add(
        self, request: Request, prompt: str | None = None, *, grammar: Grammar | None = None
    ) -> RequestState:
        """Queue a request; its state fills as steps are run, and is the caller's to keep.

        ``grammar``: the request's, where it has been compiled already.

        Raises:
            ContextLengthError: it can never fit.
            InvalidRequestError: its output ended before this engine.
            EngineError: the engine failed before.
        """
        self._check_alive()
        self._abort_dropped()
        grammar = grammar or self._scheduler.speculation.prepare(request)
        sequences = self._scheduler.add(request, grammar)
        try:
            state = RequestState(request, sequences, self._tokenizer, prompt, self._clock)
        except InvalidRequestError:
            for sequence in sequences:
                self._scheduler.finish(sequence, FinishReason.ABORT)
            raise
        self._states[request.request_id] = state
        self._prompt_tokens += len(request.prompt_token_ids)
        return state

    def step(self) -> Seq[CompletionChunk]:
        """Run one step and return what it added to each sample.

        Raises:
            EngineError: the executor or the scheduler failed; every later call raises it again.
        """
        if not self._stepping.acquire(blocking=False):
            raise EngineError("The engine is used from two threads at once.")
        try:
            return self._step()
        finally:
            self._stepping.release()

    def _step(self) -> Seq[CompletionChunk]:
        """Submit as far ahead as the scheduler plans, and take the result of the oldest step.

        What follows from a result (text, chunks, the next plan) is done while the step after it
        runs.
        """
        self._check_alive()
        with self.interrupts:
            self._abort_dropped()
        while len(self._in_flight) < self._scheduler.config.max_in_flight and self._submit_next():
            pass
        if not self._in_flight:
            with self.interrupts:
                return self._apply(self._scheduler.take_shed(), self._clock())
        with self._is_final("executor"):
            result = self._in_flight[0].handle.result()
        with self.interrupts:
            step = self._in_flight.popleft()
            self._note(step, result)
            return self._apply(self._scheduler.update(step.plan, result), step.started_s)

    def _submit_next(self) -> bool:
        with self.interrupts:
            with self._is_final("scheduler"):
                plan = self._scheduler.schedule()
            if plan is None:
                return False
            with self._is_final("executor"):
                handle = self._executor.submit(plan)
            self._in_flight.append(_StepInFlight(plan, handle, self._clock()))
            with self._is_final("scheduler"):
                masks = self._scheduler.speculation.masks(plan)
            if masks:
                with self._is_final("executor"):
                    handle.set_masks(masks)
        return True

    def idle(self) -> None:
        """While there is no work: cached KV expires."""
        self._abort_dropped()
        self._scheduler.idle()

    @contextmanager
    def _is_final(self, part: str) -> Iterator[None]:
        """An error in here ends the engine; ``part`` is what its message blames."""
        try:
            yield
        except Exception as error:
            self._failure = EngineError(f"The {part} failed: {error}")
            raise self._failure from error

    def _apply(self, updates: Seq[SequenceUpdate], started_s: float) -> Seq[CompletionChunk]:
        chunks: list[CompletionChunk] = []
        ending: set[int] = set()
        for update in updates:
            state = self._states[update.sequence.request.request_id]
            state.note_start(started_s)
            chunk = self._take(state, update)
            if chunk.token_ids or chunk.finish_reason:
                chunks.append(chunk)
            if chunk.finish_reason:
                ending.add(chunk.request_id)
        ended = [self._states.pop(number) for number in ending if self._states[number].is_finished]
        for state in ended:
            chunks.extend(state.unreported_ends())
        last = {chunk.request_id: index for index, chunk in enumerate(chunks)} if ended else {}
        for state in ended:
            index = last[state.request.request_id]
            chunks[index] = replace(chunks[index], timings=state.timings())
        return chunks

    def _take(self, state: RequestState, update: SequenceUpdate) -> CompletionChunk:
        """What a step did for one sample; if that cannot be told, only this sample ends."""
        try:
            chunk, stopped = state.apply(update)
        except Exception:
            _log.exception("The output of a request could not be made.")
            self._scheduler.finish(update.sequence, FinishReason.ERROR)
            return state.fail(update.sequence)
        self._generated_tokens += len(chunk.token_ids)
        if stopped:
            self._scheduler.finish(update.sequence, FinishReason.STOP)
        return chunk

    def _note(self, step: _StepInFlight, result: StepResult) -> None:
        plan, now = step.plan, self._clock()
        # The executor's own clock: this thread may be late to see the end of the step before.
        seconds = result.timings.total_s or now - max(step.started_s, self._last_progress_s)
        self._last_step_id, self._last_progress_s = plan.step_id, now
        if self._observer is not None:
            self._observer.observe(plan, result, seconds)
        self._records.append(
            StepRecord(
                step_id=plan.step_id,
                finished_s=now,
                seconds=seconds,
                num_tokens=plan.num_tokens,
                num_sequences=sum(len(a_pass.segments) for a_pass in plan.passes),
                num_steps=max((a_pass.num_steps for a_pass in plan.passes), default=1),
            )
        )

    def progress(self) -> tuple[int, bool]:
        """The last step, and whether there is something to do now, rather than after `wait_s`.

        May be called from another thread.
        """
        return self._last_step_id, self.has_work and not self.wait_s

    def stats(self) -> EngineStats:
        """Counters and the steps since the last call."""
        scheduler = self._scheduler
        cache = scheduler.prefix_cache
        records, self._records = self._records, deque(maxlen=_KEPT_STEPS)
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=max((1 - pool.num_free / pool.num_blocks for pool in cache.pools), default=0),
            kv_waste=max((usage.waste for usage in scheduler.kv_usage()), default=0),
            prefix_queries=cache.stats.queried_tokens,
            prefix_hits=cache.stats.hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_loads=scheduler.num_loads,
            tier_blocks=scheduler.num_tier_blocks,
            kv_peers=scheduler.kv_peers,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            speculation=scheduler.speculation.figures(),
            step_id=self._last_step_id,
            last_progress_s=self._last_progress_s,
            steps=tuple(records),
            roofline=(
                None
                if self._observer is None
                else self._observer.report(catch_up_s=0.0 if self.has_work else _CATCH_UP_S)
            ),
        )

    def abort(self, request_id: int) -> None:
        """End a request in any state; nothing happens if it has ended already."""
        state = self._states.pop(request_id, None)
        for sequence in state.sequences if state else ():
            self._scheduler.finish(sequence, FinishReason.ABORT)

    def abort_later(self, request_id: int) -> None:
        """End a request before the next step; may be called from any thread and within a step."""
        self._dropped.append(request_id)

    def _abort_dropped(self) -> None:
        while self._dropped:
            self.abort(self._dropped.popleft())

    def close(self) -> None:
        """Refuse everything from now on."""
        self._failure = self._failure or EngineError("The engine is closed.")

    def check_integrity(self) -> None:
        """Assert the scheduler's invariants; tests call it after every step."""
        self._scheduler.check_integrity()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        if os.getpid() != self._process:  # a fork has none of the threads
            raise EngineError("An engine does not survive a fork: make one in each process.")
