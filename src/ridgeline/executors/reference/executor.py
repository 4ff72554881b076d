"""`ReferenceExecutor`: plain PyTorch, the shortest code that is right."""

from collections.abc import Callable, Mapping, Sequence

import torch

from ridgeline.core.plan import Admission, ModelRole, Segment
from ridgeline.core.result import SegmentResult
from ridgeline.executors.base import PoolExecutor
from ridgeline.executors.handle import Handle
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.outputs import num_logit_rows, segment_result
from ridgeline.executors.reference.batch import Batch, SegmentInput, build_batch
from ridgeline.executors.reference.forward import Forward
from ridgeline.executors.reference.kv_cache import KVCache, kv_rows
from ridgeline.executors.runner import Clock, MaskOf
from ridgeline.executors.state import SequenceState
from ridgeline.weights import expanded_weights


class ReferenceExecutor(PoolExecutor[KVCache]):
    """See `ridgeline.core.protocols.Executor` for the contract."""

    name = "reference"

    def __init__(self, models: Mapping[ModelRole, ExecutorModel], block_tokens: int) -> None:
        super().__init__(
            self.name,
            {role: model.spec for role, model in models.items()},
            kernels=torch.__version__,
        )
        self._models = dict(models)
        self._weights = {
            role: expanded_weights(model.weights, model.dtype) for role, model in models.items()
        }
        self.pools = {
            role: KVCache(model.spec, model.dtype, block_tokens) for role, model in models.items()
        }

    def free(self) -> None:
        self._models.clear()
        self._weights.clear()

    def new_state(self, admission: Admission) -> SequenceState:
        return SequenceState(admission)

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
        forward = Forward(self._models[role], self._weights[role], self.pools[role], batch)
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
            results.append(segment_result(item, logits, _last_row(hidden_SD), mask(), role=role))
            self._record(item, results[-1], batch)
        clock.lap("sample_s")
        return tuple(results)

    def _record(self, item: SegmentInput, result: SegmentResult, batch: Batch) -> None:
        """Remember sampled tokens; move the KV of an accepted path to consecutive slots."""
        segment, state = item.segment, item.state
        first_draft = segment.stop - segment.num_drafts
        if segment.parents and result.accepted:
            cache = self.pools[batch.role]
            sources = torch.tensor([first_draft + node for node in result.accepted])
            for group in range(len(cache.groups)):
                table = state.tables[batch.role, group]
                rows = kv_rows(table, 0, segment.stop, cache.block_tokens)
                targets = rows[first_draft : first_draft + len(sources)]
                cache.move_rows(group, rows[sources], targets)
        state.set_tokens(batch.role, first_draft, result.token_ids)
        if batch.role is ModelRole.TARGET:
            state.proposals.clear()


def _last_row(hidden_SD: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: hidden_SD[-1]
