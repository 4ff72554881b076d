"""`ReferenceExecutor`: runs plans one after the other on a thread of its own."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ridgeline.core.errors import EngineError
from ridgeline.core.plan import (
    ModelRole,
    Pass,
    Segment,
    StepPlan,
    is_earlier_pass,
    is_reference,
    referenced_output,
)
from ridgeline.core.protocols import KVLayout
from ridgeline.core.result import SegmentResult, StepResult, StepTimings
from ridgeline.core.spec import ModelSpec
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.reference.batch import Batch, SegmentInput, build_batch
from ridgeline.executors.reference.forward import Forward
from ridgeline.executors.reference.kv_cache import KVCache
from ridgeline.executors.reference.outputs import Mask, segment_result
from ridgeline.executors.reference.state import SequenceState

_NOT_SAMPLED = -1


class _Handle:
    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.aborted = threading.Event()
        self.masks: dict[tuple[int, int], Mask] = {}
        self.masks_complete = threading.Event()
        self.future: Future[StepResult] = Future()
        self._masked = {
            (p, s)
            for p, a_pass in enumerate(plan.passes)
            for s, segment in enumerate(a_pass.segments)
            if segment.outputs.masked
        }
        self._signal_if_complete()

    def set_masks(self, masks: Mapping[tuple[int, int], Mask]) -> None:
        self.masks.update(masks)
        self._signal_if_complete()

    def abort(self) -> None:
        self.aborted.set()

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> StepResult:
        if not self.masks_complete.is_set():
            raise EngineError("A step was awaited before the masks that it needs were set.")
        return self.future.result()

    def _signal_if_complete(self) -> None:
        if self._masked <= self.masks.keys():
            self.masks_complete.set()


class ReferenceExecutor:
    """See `ridgeline.core.protocols.Executor` for the contract."""

    name = "reference"

    def __init__(self, models: Mapping[ModelRole, ExecutorModel], block_tokens: int) -> None:
        self._models = dict(models)
        self._caches = {
            role: KVCache(model.spec, model.dtype, block_tokens) for role, model in models.items()
        }
        self._states: dict[int, SequenceState] = {}
        self._previous_outputs: list[int] = []  # of the plan before, by output number
        self._outputs: list[int] = []  # of the plan that runs
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reference-executor")

    def spec(self, role: ModelRole = ModelRole.TARGET) -> ModelSpec:
        return self._models[role].spec

    def kv_layout(self, role: ModelRole = ModelRole.TARGET) -> KVLayout:
        return self._caches[role].layout

    def allocate_kv(self, num_blocks: Sequence[int], role: ModelRole = ModelRole.TARGET) -> None:
        self._caches[role].allocate(num_blocks)

    def export_blocks(
        self, group: int, blocks: Sequence[int], role: ModelRole = ModelRole.TARGET
    ) -> bytes:
        return self._thread.submit(self._caches[role].export_blocks, group, blocks).result()

    def import_blocks(
        self, group: int, blocks: Sequence[int], data: bytes, role: ModelRole = ModelRole.TARGET
    ) -> None:
        self._thread.submit(self._caches[role].import_blocks, group, blocks, data).result()

    def close(self) -> None:
        self._thread.shutdown()

    def submit(self, plan: StepPlan) -> _Handle:
        handle = _Handle(plan)
        handle.future = self._thread.submit(self._run, handle)
        return handle

    @torch.inference_mode()
    def _run(self, handle: _Handle) -> StepResult:
        plan, clock = handle.plan, _Clock()
        if plan.loads or plan.saves:
            raise EngineError("The reference executor has no KV tier to load from or save to.")
        self._previous_outputs, self._outputs = self._outputs, []
        for slot in plan.releases:
            del self._states[slot]
        for admission in plan.admissions:
            self._states[admission.slot] = SequenceState(admission, list(admission.token_ids))
        for copy in plan.copies:
            self._caches[copy.role].copy_block(copy.group, copy.source, copy.target)
        results = tuple(
            self._run_pass(a_pass, index, handle, clock) for index, a_pass in enumerate(plan.passes)
        )
        return StepResult(
            step_id=plan.step_id,
            passes=results,
            timings=clock.timings(),
            aborted=handle.aborted.is_set(),
        )

    def _run_pass(
        self, a_pass: Pass, index: int, handle: _Handle, clock: "_Clock"
    ) -> tuple[SegmentResult, ...]:
        first = self._forward(a_pass.segments, index, a_pass.role, handle, clock)
        steps = [first]
        segments = a_pass.segments
        while len(steps) < a_pass.num_steps and not handle.aborted.is_set():
            segments = tuple(
                _next_segment(segment, result.token_ids[-1])
                for segment, result in zip(segments, steps[-1], strict=True)
            )
            steps.append(self._forward(segments, index, a_pass.role, handle, clock))
        results = tuple(_join(parts) for parts in zip(*steps, strict=True))
        for segment, result in zip(a_pass.segments, results, strict=True):
            self._number_outputs(segment, result, a_pass.num_steps)
        return results

    def _forward(
        self,
        segments: Sequence[Segment],
        pass_index: int,
        role: ModelRole,
        handle: _Handle,
        clock: "_Clock",
    ) -> tuple[SegmentResult, ...]:
        tokens = [[self._resolve(token) for token in segment.token_ids] for segment in segments]
        batch = build_batch(segments, tokens, self._states, role)
        clock.lap("prepare_s")
        forward = Forward(self._models[role], self._caches[role], batch)
        hidden_TD = forward.run()
        clock.lap("forward_s")
        handle.masks_complete.wait()
        results = []
        for number, (item, first, last) in enumerate(batch.ranges()):
            mask = handle.masks.get((pass_index, number))
            results.append(segment_result(item, hidden_TD[first:last], forward.logits, mask))
            self._record(item, results[-1], batch)
        clock.lap("sample_s")
        return tuple(results)

    def _resolve(self, token: int) -> int:
        if not is_reference(token):
            return token
        outputs = self._outputs if is_earlier_pass(token) else self._previous_outputs
        value = outputs[referenced_output(token)]
        if value == _NOT_SAMPLED:
            raise EngineError("A plan refers to an output that the step before did not yield.")
        return value

    def _record(self, item: SegmentInput, result: SegmentResult, batch: Batch) -> None:
        """Remember sampled tokens; move the KV of an accepted path to consecutive slots.

        A draft model's tokens are proposals: they stay unknown until the target accepts them.
        """
        segment, state = item.segment, item.state
        first_draft = segment.stop - segment.num_drafts
        if segment.parents and result.accepted:
            cache = self._caches[batch.role]
            sources = torch.tensor([first_draft + node for node in result.accepted])
            for group in range(len(cache.groups)):
                rows = state.kv_rows(batch.role, group, 0, segment.stop, cache.block_tokens)
                targets = rows[first_draft : first_draft + len(sources)]
                cache.move_rows(group, rows[sources], targets)
        if batch.role is ModelRole.TARGET and result.token_ids:
            state.set_tokens(first_draft, result.token_ids)

    def _number_outputs(self, segment: Segment, result: SegmentResult, num_steps: int) -> None:
        if segment.outputs.sample:
            count = num_steps + segment.num_drafts
            missing = count - len(result.token_ids)
            self._outputs.extend([*result.token_ids, *[_NOT_SAMPLED] * missing])


class _Clock:
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


def _next_segment(segment: Segment, token: int) -> Segment:
    return Segment(
        slot=segment.slot,
        start=segment.stop,
        stop=segment.stop + 1,
        token_ids=(token,),
        outputs=segment.outputs,
    )


def _join(parts: Sequence[SegmentResult]) -> SegmentResult:
    if len(parts) == 1:
        return parts[0]
    return SegmentResult(
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
    )
