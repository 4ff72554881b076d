"""`ReferenceExecutor`: plain PyTorch, the shortest code that is right."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ridgeline.core.arrays import Array
from ridgeline.core.plan import Admission, ModelRole, Segment
from ridgeline.core.recorded_step import OpSpan
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.executors.base import PoolExecutor
from ridgeline.executors.features import depths_of_rows
from ridgeline.executors.handle import Handle
from ridgeline.executors.kv_reuse import take_over
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.outputs import SegmentContext, SegmentRows, num_logit_rows
from ridgeline.executors.pipeline import AwaitedPass
from ridgeline.executors.reference.batch import Batch, build_batch
from ridgeline.executors.reference.forward import Forward
from ridgeline.executors.reference.kv_cache import ReferenceKVCache, kv_rows
from ridgeline.executors.reference.token_ops import add_tokens
from ridgeline.executors.runner import Clock, MaskOf
from ridgeline.executors.state import SequenceState
from ridgeline.kernels.tensors import as_array, as_tensor, torch_dtype
from ridgeline.weights import expanded_weights


class ReferenceExecutor(PoolExecutor[ReferenceKVCache]):
    """See `ridgeline.core.protocols.Executor` for the contract."""

    name = "reference"

    def __init__(
        self,
        models: Mapping[ModelRole, ExecutorModel],
        block_tokens: int,
        *,
        kv_cache_dtype: str = "auto",
    ) -> None:
        super().__init__(
            self.name,
            {role: model.spec for role, model in models.items()},
            kernels=str(torch.__version__),
            pipe=models[ModelRole.TARGET].pipe,
            shares=any(model.shares_kv for model in models.values()),
        )
        self._models = dict(models)
        self._expert_tokens: dict[str, Array] = {}
        self._weights: dict[ModelRole, dict[str, torch.Tensor]] = {}
        for role, model in models.items():
            if model.shares_kv:
                self.pools[role] = self.pools[ModelRole.TARGET]
            if model.is_exit:
                self._weights[role] = self._weights[ModelRole.TARGET]
                continue
            weights = expanded_weights(model.weights, model.dtype)
            self._weights[role] = {name: as_tensor(values) for name, values in weights.items()}
            if model.borrowed is not None:
                targets = self._weights[ModelRole.TARGET]
                self._weights[role] |= {
                    name: targets[theirs] for name, theirs in model.borrowed.items()
                }
                continue
            self.pools[role] = ReferenceKVCache(
                model.spec, torch_dtype(model.dtype), block_tokens, kv_cache_dtype
            )

    def expert_tokens(self) -> Mapping[str, Array]:
        return {router: counts.copy() for router, counts in self._expert_tokens.items()}

    def free(self) -> None:
        self._models.clear()
        self._weights.clear()

    def new_state(self, admission: Admission) -> SequenceState:
        return SequenceState(admission, self.shares)

    @torch.inference_mode()
    def run(self, handle: Handle) -> StepResult:
        return super().run(handle)

    def forward(
        self,
        segments: Sequence[Segment],
        role: ModelRole,
        handle: Handle,
        masks: Sequence[MaskOf],
        clock: Clock,
    ) -> tuple[SegmentResult, ...] | AwaitedPass:
        spans: list[OpSpan] = []
        batch, rows_of = self._run_batch(segments, role, clock, spans)
        if self.awaited is not None and role is ModelRole.TARGET:
            return self.awaited.add(batch.segments, role)
        handle.wait_for_masks()
        set_masks = [mask() for mask in masks]
        undrawn = [None] * len(segments)
        results = self.results(batch.segments, role, set_masks, undrawn, rows_of)
        if self.recorder is not None:
            self.recorder.add(role, lambda: (tuple(spans),))
        clock.lap("sample_s")
        return tuple(results)

    def _run_batch(
        self, segments: Sequence[Segment], role: ModelRole, clock: Clock, spans: list[OpSpan]
    ) -> tuple[Batch, Callable[[int], SegmentRows]]:
        batch = build_batch(segments, self.states, role, is_head=self._models[role].is_head)
        if role is ModelRole.TARGET:
            take_over(batch.segments, self._models[role].ops, self.pools[role].reuse)
        clock.lap("prepare_s")
        if self._models[role].later:
            return batch, self._rows_by_depth(batch, role, clock)
        forward = Forward(self._models[role], self._weights[role], self.pools[role], batch)
        is_recorded = self.recorder is not None
        hidden_TD = forward.run_recorded(spans) if is_recorded else forward.run()
        if role is ModelRole.TARGET:
            self.experts_read = (self.experts_read or 0) + forward.experts_read
            add_tokens(self._expert_tokens, forward.expert_tokens)
        clock.lap("forward_s")
        ranges = batch.ranges()

        def rows_of(number: int) -> SegmentRows:
            item, first, last = ranges[number]
            hidden_SD = hidden_TD[first:last]
            rows = num_logit_rows(item.segment)
            logits = hidden_SD[:0]
            if rows:
                last_ND = hidden_SD[len(hidden_SD) - rows :]
                logits = (
                    forward.logits_recorded(last_ND, spans)
                    if is_recorded
                    else forward.logits(last_ND)
                )
            return SegmentRows(as_array(logits), lambda: as_array(hidden_SD))

        return batch, rows_of

    def _rows_by_depth(
        self, batch: Batch, role: ModelRole, clock: Clock
    ) -> Callable[[int], SegmentRows]:
        """Each row by what drafts at its distance."""
        model, depths = self._models[role], depths_of_rows(batch.segments)
        programs, found = (model.ops, *model.later), dict[int, tuple[Forward, torch.Tensor]]()
        for depth in sorted({*depths}):
            own = replace(model, ops=programs[depth], later=())
            forward = Forward(own, self._weights[role], self.pools[role], batch)
            found[depth] = forward, forward.run()
        clock.lap("forward_s")
        ranges = batch.ranges()

        def rows_of(number: int) -> SegmentRows:
            item, first, last = ranges[number]
            logits = []
            for row in range(last - num_logit_rows(item.segment), last):
                forward, hidden_TD = found[depths[row]]
                logits.append(forward.logits(hidden_TD[row : row + 1]))
            hidden_SD = found[depths[first]][1][first:last]
            return SegmentRows(as_array(torch.cat(logits)), lambda: as_array(hidden_SD))

        return rows_of

    def draft_logits(
        self, segments: Sequence[Segment], role: ModelRole, clock: Clock
    ) -> list[tuple[SegmentContext, Array]]:
        spans: list[OpSpan] = []
        batch, rows_of = self._run_batch(segments, role, clock, spans)
        found: list[tuple[SegmentContext, Array]] = [
            (item, rows_of(number).logits_NV) for number, item in enumerate(batch.segments)
        ]
        if self.recorder is not None:
            self.recorder.add(role, lambda: (tuple(spans),))
        return found

    def move_kv(
        self, role: ModelRole, state: SequenceState, sources: Sequence[int], first: int
    ) -> None:
        cache, stop = self.pools[role], sources[-1] + 1
        for group in range(len(cache.groups)):
            rows = kv_rows(state.table(role, group), 0, stop, cache.block_tokens)
            targets = rows[first : first + len(sources)]
            cache.move_rows(group, rows[torch.tensor(sources)], targets)
