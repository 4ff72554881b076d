"""`ReferenceExecutor`: plain PyTorch, the shortest code that is right."""

from collections.abc import Callable, Mapping, Sequence

import torch

from ridgeline.core.plan import Admission, BlockCopy, ModelRole, Segment
from ridgeline.core.protocols import KVLayout
from ridgeline.core.result import SegmentResult
from ridgeline.core.spec import ModelSpec
from ridgeline.executors.handle import Handle
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.outputs import num_logit_rows, segment_result
from ridgeline.executors.reference.batch import Batch, SegmentInput, build_batch
from ridgeline.executors.reference.forward import Forward
from ridgeline.executors.reference.kv_cache import KVCache, kv_rows
from ridgeline.executors.runner import Clock, MaskOf, StepRunner
from ridgeline.executors.state import SequenceState
from ridgeline.weights import expanded_weights


class ReferenceExecutor(StepRunner):
    """See `ridgeline.core.protocols.Executor` for the contract."""

    name = "reference"

    def __init__(self, models: Mapping[ModelRole, ExecutorModel], block_tokens: int) -> None:
        super().__init__(self.name)
        self._models = dict(models)
        self._weights = {
            role: expanded_weights(model.weights, model.dtype) for role, model in models.items()
        }
        self._caches = {
            role: KVCache(model.spec, model.dtype, block_tokens) for role, model in models.items()
        }

    def spec(self, role: ModelRole = ModelRole.TARGET) -> ModelSpec:
        return self._models[role].spec

    def kv_layout(self, role: ModelRole = ModelRole.TARGET) -> KVLayout:
        return self._caches[role].layout

    def allocate_kv(self, num_blocks: Sequence[int], role: ModelRole = ModelRole.TARGET) -> None:
        self._caches[role].allocate(num_blocks)

    def export_blocks(
        self, group: int, blocks: Sequence[int], role: ModelRole = ModelRole.TARGET
    ) -> bytes:
        return self.thread.submit(self._caches[role].export_blocks, group, blocks).result()

    def import_blocks(
        self, group: int, blocks: Sequence[int], data: bytes, role: ModelRole = ModelRole.TARGET
    ) -> None:
        self.thread.submit(self._caches[role].import_blocks, group, blocks, data).result()

    def close(self) -> None:
        self.stop()
        self._models.clear()
        self._weights.clear()
        self._caches.clear()

    def new_state(self, admission: Admission) -> SequenceState:
        return SequenceState(admission)

    def copy_block(self, copy: BlockCopy) -> None:
        self._caches[copy.role].copy_block(copy.group, copy.source, copy.target)

    def forward(
        self,
        segments: Sequence[Segment],
        role: ModelRole,
        handle: Handle,
        masks: Sequence[MaskOf],
        clock: Clock,
    ) -> tuple[SegmentResult, ...]:
        batch = build_batch(segments, self.states, role)
        clock.lap("prepare_s")
        forward = Forward(self._models[role], self._weights[role], self._caches[role], batch)
        hidden_TD = forward.run()
        if role is ModelRole.TARGET:
            self.experts_read = (self.experts_read or 0) + forward.experts_read
        clock.lap("forward_s")
        handle.wait_for_masks()
        results = []
        for (item, first, last), mask in zip(batch.ranges(), masks, strict=True):
            hidden_SD = hidden_TD[first:last]
            rows = num_logit_rows(item.segment)
            logits = forward.logits(hidden_SD[len(hidden_SD) - rows :]) if rows else hidden_SD[:0]
            results.append(segment_result(item, logits, _last_row(hidden_SD), mask()))
            self._record(item, results[-1], batch)
        clock.lap("sample_s")
        return tuple(results)

    def _record(self, item: SegmentInput, result: SegmentResult, batch: Batch) -> None:
        """Remember sampled tokens; move the KV of an accepted path to consecutive slots."""
        segment, state = item.segment, item.state
        first_draft = segment.stop - segment.num_drafts
        if segment.parents and result.accepted:
            cache = self._caches[batch.role]
            sources = torch.tensor([first_draft + node for node in result.accepted])
            for group in range(len(cache.groups)):
                table = state.tables[batch.role, group]
                rows = kv_rows(table, 0, segment.stop, cache.block_tokens)
                targets = rows[first_draft : first_draft + len(sources)]
                cache.move_rows(group, rows[sources], targets)
        state.set_tokens(batch.role, first_draft, result.token_ids)


def _last_row(hidden_SD: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: hidden_SD[-1]
