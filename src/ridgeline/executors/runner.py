"""`StepRunner`: what running a plan means, whatever computes the forward passes.

Order, references to sampled tokens, void segments, replay and the bookkeeping of sequences are the
same for every executor that has a model; `forward` is what they differ in.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ridgeline.core.errors import EngineError, InvalidRequestError
from ridgeline.core.plan import (
    GROWN,
    Admission,
    BlockCopy,
    ModelRole,
    Pass,
    Segment,
    StepPlan,
    is_reference,
    num_outputs,
    plans_back,
    referenced_output,
)
from ridgeline.core.result import SegmentResult, StepResult, StepTimings
from ridgeline.executors.handle import Handle, Mask
from ridgeline.executors.pipeline import AwaitedPass, AwaitedPasses
from ridgeline.executors.recorder import Recorder, Recording
from ridgeline.executors.state import SequenceState

_NOT_SAMPLED = -1

MaskOf = Callable[[], Mask | None]


class StepRunner(ABC):
    """Runs plans one after the other on a thread of its own."""

    max_in_flight = 2  # one that runs (of a pipeline, in each stage), and one that is ready

    def __init__(self, name: str, *, num_stages: int = 1) -> None:
        self.max_in_flight = max(self.max_in_flight, num_stages + 1)
        self.states: dict[int, SequenceState] = {}
        self._name = name
        self._handles: list[Handle] = []  # submitted, perhaps not done
        # Of the last plans that were run, by output number, the latest first.
        self._done_outputs: deque[Sequence[int]] = deque(maxlen=self.max_in_flight - 1)
        self._outputs: list[int] = []  # of the plan that runs
        self._grown: dict[int, tuple[int, ...]] = {}  # parents of the trees in it, by slot
        self._referable: Sequence[Sequence[int]] = ()  # those, and of plans before, by their age
        self.experts_read: int | None = None  # by the target, in the plan that runs
        self.recorder: Recorder | None = None  # of the steps that run now
        self._recording: Future[Recording] | None = None
        self.awaited: AwaitedPasses | None = None  # where later stages tell what comes of passes
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name}-executor")

    @abstractmethod
    def new_state(self, admission: Admission) -> SequenceState:
        """What is remembered of a sequence."""

    @abstractmethod
    def copy_block(self, copy: BlockCopy) -> None:
        """Copy a KV block over another."""

    @abstractmethod
    def forward(
        self,
        segments: Sequence[Segment],
        role: ModelRole,
        handle: Handle,
        masks: Sequence[MaskOf],
        clock: "Clock",
    ) -> tuple[SegmentResult, ...] | AwaitedPass:
        """One forward pass over segments whose references are resolved, and what came of each.

        Waits for masks (``handle.wait_for_masks``) just before it samples, and records what it
        sampled in the states.
        """

    def replay(
        self,
        segments: Sequence[Segment],
        role: ModelRole,
        num_steps: int,
        handle: Handle,
        clock: "Clock",
    ) -> list[tuple[SegmentResult, ...]] | None:
        """``num_steps`` decode steps in one go, or ``None`` to have them run one by one."""
        return None

    @abstractmethod
    def grow(
        self, segments: Sequence[Segment], a_pass: Pass, handle: Handle, clock: "Clock"
    ) -> tuple[SegmentResult, ...]:
        """The trees of a pass that asks for nodes (`Pass.num_nodes`)."""

    def submit(self, plan: StepPlan) -> Handle:
        handle = self.new_handle(plan)
        handle.future = self.thread.submit(self._run_or_fail, handle)
        return handle

    def new_handle(self, plan: StepPlan) -> Handle:
        """The handle of a step, which `stop` aborts if it is not done by then."""
        handle = Handle(plan)
        self._handles = [*(each for each in self._handles if not each.done()), handle]
        return handle

    def stop(self) -> None:
        """Abort what runs, and end the thread."""
        for handle in self._handles:
            handle.abort()
        self.thread.shutdown()
        self.states.clear()

    def _run_or_fail(self, handle: Handle) -> StepResult:
        try:
            return self.run(handle)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"A step failed: {type(error).__name__}: {error}") from error

    def run(self, handle: Handle) -> StepResult:
        """Run the step of a handle."""
        clock = Clock()
        self.begin(handle.plan)
        result, outputs = self.run_passes(handle, self._done_outputs, clock)
        self._done_outputs.appendleft(outputs)
        self.end(handle.plan)
        return result

    def record(self, num_steps: int) -> Future[Recording]:
        """Have the next steps recorded: what each op of them takes, and when.

        The future is done with the last of them, or by `stop_recording`. Results are the same.

        Raises:
            InvalidRequestError: steps are being recorded.
        """
        if self._recording is not None and not self._recording.done():
            raise InvalidRequestError("Steps are being recorded already.")
        recorder = Recorder(num_steps)
        self._recording = recorder.recorded
        self.thread.submit(self._start_recording, recorder)
        return recorder.recorded

    def stop_recording(self) -> None:
        """End a recording early, after the steps that were submitted; without one do nothing."""
        self.thread.submit(self._end_recording)

    def recording_changes(self, on: bool) -> None:
        """The steps from now on are recorded, or no longer."""
        return

    def _start_recording(self, recorder: Recorder) -> None:
        self.recording_changes(True)
        self.recorder = recorder

    def _end_recording(self) -> None:
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            self.recording_changes(False)
            recorder.finish()

    def end(self, plan: StepPlan) -> None:
        """What comes after the passes: the recording of steps may be complete."""
        if self.recorder is not None and self.recorder.end(plan):
            self._end_recording()

    def begin(self, plan: StepPlan) -> None:
        """What comes before the passes: releases, admissions, copies."""
        if self.recorder is not None:
            self.recorder.begin()
        for slot in plan.releases:
            del self.states[slot]
        for admission in plan.admissions:
            self.states[admission.slot] = self.new_state(admission)
        if plan.copies:
            self.settle()
        for copy in plan.copies:
            self.copy_block(copy)

    def run_passes(
        self, handle: Handle, before: Iterable[Sequence[int]], clock: "Clock"
    ) -> tuple[StepResult, list[int]]:
        """The passes of a plan, and its outputs; ``before`` are those of the plans before it, the
        latest first."""
        plan, self._outputs = handle.plan, []
        self._grown.clear()
        self._referable = (self._outputs, *before)
        self.experts_read = None
        results = tuple(
            self._run_pass(a_pass, index, handle, clock) for index, a_pass in enumerate(plan.passes)
        )
        result = StepResult(
            step_id=plan.step_id,
            passes=results,
            timings=clock.timings(),
            aborted=handle.aborted.is_set(),
            experts_read=self.experts_read,
        )
        return result, self._outputs

    def _run_pass(
        self, a_pass: Pass, index: int, handle: Handle, clock: "Clock"
    ) -> tuple[SegmentResult, ...]:
        if self.recorder is not None:
            self.recorder.pass_index = index
        self.settle([segment.slot for segment in a_pass.segments])
        tokens = [self._resolve(segment.token_ids) for segment in a_pass.segments]
        live = [number for number, resolved in enumerate(tokens) if resolved is not None]
        segments = [self._live(a_pass.segments[number], tokens[number] or ()) for number in live]
        masks = [handle.masks_of(index, number) for number in live]
        steps, awaited = self._steps(segments, a_pass, handle, masks, clock) if live else ([], None)
        results = [SegmentResult()] * len(a_pass.segments)
        for number, *parts in zip(live, *steps, strict=True):
            results[number] = _join(parts)
        places = []
        for segment, result in zip(a_pass.segments, results, strict=True):
            places.append(len(self._outputs))
            missing = num_outputs(segment, a_pass) - len(result.token_ids)
            self._outputs.extend([*result.token_ids, *[_NOT_SAMPLED] * missing])
            if a_pass.num_nodes:
                self._grown[segment.slot] = result.parents
        if awaited is not None:
            awaited.outputs, awaited.places = self._outputs, [places[number] for number in live]
        return tuple(results)

    def settle(self, slots: Collection[int] | None = None) -> None:
        """Have the outcomes of all passes with these slots, or of all passes."""
        if self.awaited is not None:
            self.awaited.settle(slots)

    def _steps(
        self,
        segments: list[Segment],
        a_pass: Pass,
        handle: Handle,
        masks: Sequence[MaskOf],
        clock: "Clock",
    ) -> tuple[list[tuple[SegmentResult, ...]], AwaitedPass | None]:
        """What each of the pass's steps gave each segment; of one that a later stage tells of it is
        nothing yet."""
        if a_pass.num_nodes:
            return [self.grow(segments, a_pass, handle, clock)], None
        if a_pass.num_steps > 1:
            steps = self.replay(segments, a_pass.role, a_pass.num_steps, handle, clock)
            if steps is not None:
                return steps, None
        found = self.forward(segments, a_pass.role, handle, masks, clock)
        if isinstance(found, AwaitedPass) and a_pass.num_steps == 1:
            return [found.results], found
        steps = [self._settled(found)]
        while len(steps) < a_pass.num_steps and not handle.aborted.is_set():
            if not all(result.token_ids for result in steps[-1]):
                break  # a sequence without a possible token; the others go on in the next step
            segments = [
                next_segment(segment, result.token_ids[-1])
                for segment, result in zip(segments, steps[-1], strict=True)
            ]
            steps.append(self._settled(self.forward(segments, a_pass.role, handle, masks, clock)))
        return steps, None

    def _settled(self, found: tuple[SegmentResult, ...] | AwaitedPass) -> tuple[SegmentResult, ...]:
        if isinstance(found, AwaitedPass):
            self.settle()
            return found.results
        return found

    def _resolve(self, token_ids: Sequence[int]) -> tuple[int, ...] | None:
        """The tokens with references replaced; ``None`` if one of them was not yielded."""
        if min(token_ids) >= 0:
            return tuple(token_ids)
        resolved = []
        for token in token_ids:
            if is_reference(token):
                token = self._referable[plans_back(token)][referenced_output(token)]
                if token == _NOT_SAMPLED:
                    return None
            resolved.append(token)
        return tuple(resolved)

    def _live(self, segment: Segment, token_ids: tuple[int, ...]) -> Segment:
        """A segment without references."""
        if segment.parents and segment.parents[0] == GROWN:
            segment = segment._replace(parents=self._grown[segment.slot])
        return segment if token_ids == segment.token_ids else segment._replace(token_ids=token_ids)


class Clock:
    """Seconds of each kind of work within a step."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._spent = {"prepare_s": 0.0, "forward_s": 0.0, "sample_s": 0.0}

    def lap(self, kind: str) -> None:
        now = time.perf_counter()
        self._spent[kind] += now - self._last
        self._last = now

    def timings(self) -> StepTimings:
        return StepTimings(**self._spent, total_s=time.perf_counter() - self._start)


def next_segment(segment: Segment, token: int) -> Segment:
    """The segment of one token that follows in a replay."""
    return Segment(
        slot=segment.slot,
        start=segment.stop,
        stop=segment.stop + 1,
        token_ids=(token,),
        outputs=segment.outputs,
        state_saves=segment.state_saves,
        window=segment.window,
    )


def _join(parts: Sequence[SegmentResult]) -> SegmentResult:
    if len(parts) == 1:
        return parts[0]
    return SegmentResult(
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
    )
