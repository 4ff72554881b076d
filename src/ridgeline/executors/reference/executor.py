"""`ReferenceExecutor`: runs plans one after the other on a thread of its own."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

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
        self.masks_complete.set()

    def done(self) -> bool:
        return self.future.done()

    def result(self) -> StepResult:
        if not self.masks_complete.is_set():
            raise EngineError("A step was awaited before the masks that it needs were set.")
        return self.future.result()

    def wait_for_masks(self) -> None:
        self.masks_complete.wait()
        if not self._masked <= self.masks.keys():
            raise EngineError("A step was aborted while it waited for masks.")

    def masks_of(self, pass_index: int, segment_index: int) -> Callable[[], Mask | None]:
        """Looks up a segment's mask when it is needed, since it may be set while the pass runs."""
        return lambda: self.masks.get((pass_index, segment_index))

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
        self._handles: list[_Handle] = []  # submitted, perhaps not done
        self._previous_outputs: list[int] = []  # of the plan before, by output number
        self._outputs: list[int] = []  # of the plan that runs
        self._experts_read = 0  # by the target, in the plan that runs
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
        for handle in self._handles:
            handle.abort()
        self._thread.shutdown()
        for owned in (self._models, self._caches, self._states):
            owned.clear()

    def submit(self, plan: StepPlan) -> _Handle:
        handle = _Handle(plan)
        self._handles = [*(each for each in self._handles if not each.done()), handle]
        handle.future = self._thread.submit(self._run_or_fail, handle)
        return handle

    def _run_or_fail(self, handle: _Handle) -> StepResult:
        try:
            return self._run(handle)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"A step failed: {type(error).__name__}: {error}") from error

    @torch.inference_mode()
    def _run(self, handle: _Handle) -> StepResult:
        plan, clock = handle.plan, _Clock()
        if plan.loads or plan.saves:
            raise EngineError("The reference executor has no KV tier to load from or save to.")
        self._previous_outputs, self._outputs = self._outputs, []
        for slot in plan.releases:
            del self._states[slot]
        for admission in plan.admissions:
            self._states[admission.slot] = SequenceState(admission)
        for copy in plan.copies:
            self._caches[copy.role].copy_block(copy.group, copy.source, copy.target)
        self._experts_read = 0
        results = tuple(
            self._run_pass(a_pass, index, handle, clock) for index, a_pass in enumerate(plan.passes)
        )
        return StepResult(
            step_id=plan.step_id,
            passes=results,
            timings=clock.timings(),
            aborted=handle.aborted.is_set(),
            experts_read=self._experts_read,
        )

    def _run_pass(
        self, a_pass: Pass, index: int, handle: _Handle, clock: "_Clock"
    ) -> tuple[SegmentResult, ...]:
        tokens = [self._resolve(segment.token_ids) for segment in a_pass.segments]
        live = [number for number, resolved in enumerate(tokens) if resolved is not None]
        segments = [replace(a_pass.segments[n], token_ids=tokens[n] or ()) for n in live]
        masks = [handle.masks_of(index, number) for number in live]
        steps = [self._forward(segments, a_pass.role, handle, masks, clock)] if live else []
        while live and len(steps) < a_pass.num_steps and not handle.aborted.is_set():
            if not all(result.token_ids for result in steps[-1]):
                break  # a sequence without a possible token; the others go on in the next step
            segments = [
                _next_segment(segment, result.token_ids[-1])
                for segment, result in zip(segments, steps[-1], strict=True)
            ]
            steps.append(self._forward(segments, a_pass.role, handle, masks, clock))
        results = [SegmentResult()] * len(a_pass.segments)
        for number, *parts in zip(live, *steps, strict=True):
            results[number] = _join(parts)
        for segment, result in zip(a_pass.segments, results, strict=True):
            self._number_outputs(segment, result, a_pass.num_steps)
        return tuple(results)

    def _forward(
        self,
        segments: Sequence[Segment],
        role: ModelRole,
        handle: _Handle,
        masks: Sequence[Callable[[], Mask | None]],
        clock: "_Clock",
    ) -> tuple[SegmentResult, ...]:
        batch = build_batch(segments, self._states, role)
        clock.lap("prepare_s")
        forward = Forward(self._models[role], self._caches[role], batch)
        hidden_TD = forward.run()
        self._experts_read += forward.experts_read if role is ModelRole.TARGET else 0
        clock.lap("forward_s")
        handle.wait_for_masks()
        results = []
        for (item, first, last), mask in zip(batch.ranges(), masks, strict=True):
            results.append(segment_result(item, hidden_TD[first:last], forward.logits, mask()))
            self._record(item, results[-1], batch)
        clock.lap("sample_s")
        return tuple(results)

    def _resolve(self, token_ids: Sequence[int]) -> tuple[int, ...] | None:
        """The tokens with references replaced; ``None`` if one of them was not yielded."""
        resolved = []
        for token in token_ids:
            if is_reference(token):
                outputs = self._outputs if is_earlier_pass(token) else self._previous_outputs
                token = outputs[referenced_output(token)]
                if token == _NOT_SAMPLED:
                    return None
            resolved.append(token)
        return tuple(resolved)

    def _record(self, item: SegmentInput, result: SegmentResult, batch: Batch) -> None:
        """Remember sampled tokens; move the KV of an accepted path to consecutive slots."""
        segment, state = item.segment, item.state
        first_draft = segment.stop - segment.num_drafts
        if segment.parents and result.accepted:
            cache = self._caches[batch.role]
            sources = torch.tensor([first_draft + node for node in result.accepted])
            for group in range(len(cache.groups)):
                rows = state.kv_rows(batch.role, group, 0, segment.stop, cache.block_tokens)
                targets = rows[first_draft : first_draft + len(sources)]
                cache.move_rows(group, rows[sources], targets)
        state.set_tokens(batch.role, first_draft, result.token_ids)

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
