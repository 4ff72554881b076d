"""Running the ops of a lowered model over a batch."""

import time
from collections.abc import Mapping

import torch
from torch.nn import functional

from ridgeline.core import ops
from ridgeline.core.recorded_step import OpSpan
from ridgeline.executors.features import PassFeatures, on_whole_vocabulary
from ridgeline.executors.kv_selection import chosen_slots
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.reference import latent
from ridgeline.executors.reference.batch import Batch, SegmentInput
from ridgeline.executors.reference.kv_cache import ReferenceKVCache, kv_rows
from ridgeline.executors.reference.states import StateAccess, run_state_op
from ridgeline.executors.reference.token_ops import TokenOps
from ridgeline.kernels import reference as kernels
from ridgeline.kernels.tensors import as_array, as_tensor

_OF_LOGITS = (ops.Head, ops.GatherLogits)  # on the rows that are wanted


class Forward(TokenOps):
    """One forward pass: the named buffers and all ops on them."""

    def __init__(
        self,
        model: ExecutorModel,
        weights: Mapping[str, torch.Tensor],
        cache: ReferenceKVCache,
        batch: Batch,
    ) -> None:
        super().__init__(weights, model.adapters, batch.tokens(), model.group)
        self._model = model
        self._cache = cache
        self._batch = batch
        self._features = PassFeatures(batch.segments, batch.role)

    def run(self) -> torch.Tensor:
        """Final hidden states ``[T, D]``, normed: the input of the LM head."""
        for op in self._model.ops:
            if not isinstance(op, _OF_LOGITS):
                self.step(op)
        self._features.store()
        return self.buffers["h"]

    def run_recorded(self, spans: list[OpSpan]) -> torch.Tensor:
        """The same, with a span for each op."""
        for place, op in enumerate(self._model.ops):
            if not isinstance(op, _OF_LOGITS):
                begin_s = time.perf_counter()
                self.step(op)
                spans.append(_span(op, place, begin_s))
        self._features.store()
        return self.buffers["h"]

    def logits_recorded(self, hidden_ND: torch.Tensor, spans: list[OpSpan]) -> torch.Tensor:
        """What `logits` gives, with a span."""
        begin_s = time.perf_counter()
        logits = self.logits(hidden_ND)
        spans.append(_span(self._model.ops[-1], len(self._model.ops) - 1, begin_s))
        return logits

    def step(self, op: ops.Op) -> None:
        """Run one op; the head is run by `logits`, on the rows that are wanted."""
        match op:
            case ops.SendHidden():
                assert self._model.pipe is not None
                self._model.pipe.send(as_array(self.buffers["x"]))
            case ops.ReceiveHidden():
                assert self._model.pipe is not None
                shape = len(self._tokens.ids_T), op.hidden_size
                rows = self._model.pipe.receive(shape, self._model.dtype)
                self.buffers["x"] = as_tensor(rows)
            case ops.KeepFeatures():
                self._features.keep(op, as_array(self.buffers[op.src]))
            case ops.ReadFeatures():
                x_TD = self.buffers["x"] = torch.empty_like(self.buffers["x"])
                features_TW = self.buffers[op.dst] = x_TD.new_empty(len(x_TD), op.width)
                self._features.read(op, as_array(features_TW), as_array(x_TD))
            case ops.JoinFeatures():
                parts = self.buffers[op.first], self.buffers[op.second]
                self.buffers["inner"] = torch.cat(parts, dim=-1)
            case ops.AddInner():
                self.buffers["h"] = self.buffers["h"] + self.buffers["inner"]
            case ops.KVWrite():
                self._write_kv(op)
            case ops.Attend():
                self._attend(op)
            case ops.BidirectionalAttend():
                self._attend_both_ways(op)
            case ops.LatentAttend():
                self._attend_latent(op)
            case ops.ShortConv() | ops.GatedDelta() | ops.SelectiveScan():
                self.buffers["h"] = run_state_op(
                    op, self.buffers, self._batch.ranges(), self._states(op), self._weight
                )
            case _:
                super().step(op)

    def _states(self, op: ops.StateOp) -> StateAccess:
        return StateAccess(self._cache, self._batch, op)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits ``[N, V]`` of some rows of what `run` returned."""
        logits = kernels.wide(hidden_ND[:, :0])  # a rank may have none of the head
        for op in self._model.ops:
            if isinstance(op, ops.Head):
                own = functional.linear(hidden_ND, self._weight(op.weight), self._optional(op.bias))
                logits = kernels.softcap(kernels.wide(own) * op.scale, op.softcap)
            elif isinstance(op, ops.GatherLogits):
                logits = self.gathered(logits, op)
        if (token_ids := self._model.token_ids) is not None:
            whole = on_whole_vocabulary(as_array(logits), token_ids, self._model.spec.vocab_size)
            return as_tensor(whole)
        return logits

    def _write_kv(self, op: ops.KVWrite) -> None:
        rows = [self._kv_rows(op.group, item, item.kv_start) for item in self._batch.segments]
        v_TKd = self.buffers["v"] if op.has_values else None
        self._cache.write(op.layer, torch.cat(rows), self.buffers["k"], v_TKd)

    def _attend(self, op: ops.Attend) -> None:
        sinks_H, outputs = self._optional(op.sinks), []
        for item, first, last in self._batch.ranges():
            rows, seen = self._context(op, item, op.window, chunked=op.chunked)
            k_CKd, v_CKd = self._cache.read(op.group, op.layer, rows)
            outputs.append(
                kernels.attend(
                    self.buffers["q"][first:last],
                    k_CKd,
                    v_CKd,
                    seen,
                    scale=op.scale,
                    cap=op.softcap,
                    sinks_H=sinks_H,
                )
            )
            if item.segment.selection is not None:
                q_SHd, keys, sinks = (
                    None if each is None else kernels.wide(each).numpy()
                    for each in (self.buffers["q"][first:last], k_CKd, sinks_H)
                )
                assert q_SHd is not None
                assert keys is not None
                chosen_KN = chosen_slots(op, item.segment, q_SHd, keys, sinks)
                self._cache.move_heads(
                    op.layer, rows[torch.from_numpy(chosen_KN)], rows[: chosen_KN.shape[1]]
                )
        self.buffers["h"] = torch.cat(outputs).flatten(1)

    def _attend_both_ways(self, op: ops.BidirectionalAttend) -> None:
        q_THd, k_TKd, v_TKd = (self.buffers[name] for name in "qkv")
        outputs = []
        for item, first, last in self._batch.ranges():
            distance = (item.kv_positions_C[:, None] - item.kv_positions_C[None, :]).abs()
            outputs.append(
                kernels.attend(
                    q_THd[first:last],
                    k_TKd[first:last],
                    v_TKd[first:last],
                    distance < (op.window or len(distance)),
                    scale=op.scale,
                    cap=op.softcap,
                )
            )
        self.buffers["h"] = torch.cat(outputs).flatten(1)

    def _attend_latent(self, op: ops.LatentAttend) -> None:
        outputs = []
        for item, first, last in self._batch.ranges():
            rows, seen = self._context(op, item, None)
            latent_C1W, _ = self._cache.read(op.group, op.layer, rows)
            q_SHd = self.buffers["q"][first:last]
            outputs.append(latent.attend(op, q_SHd, latent_C1W, seen, self._weight))
        self.buffers["h"] = torch.cat(outputs).flatten(1)

    def _context(
        self,
        op: ops.Attend | ops.LatentAttend,
        item: SegmentInput,
        window: int | None,
        *,
        chunked: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache rows ``[C]`` of what any token of a segment sees, and what each sees ``[S, C]``."""
        sinks, start = 0, item.kv_start
        if window is None and item.segment.window is not None:
            sinks, window = item.segment.window
        low = kernels.first_visible(start, window, chunked=chunked)
        rows = self._kv_rows(op.group, item, low)
        seen = _visible(item, low, window, chunked=chunked)
        if not sinks:
            return rows, seen
        before = _visible(item, 0, None)[:, :sinks]
        seen[:, : max(0, sinks - low)] |= before[:, low:]
        sink_rows = self._kv_rows(op.group, item, 0)[: min(sinks, low)]
        return torch.cat([sink_rows, rows]), torch.cat([before[:, : min(sinks, low)], seen], dim=1)

    def _kv_rows(self, group: int, item: SegmentInput, start: int) -> torch.Tensor:
        """Cache rows of KV slots ``[start, stop)`` of a segment."""
        table = item.state.table(self._batch.role, group)
        return kv_rows(table, start, item.kv_stop, self._cache.block_tokens)


def _span(op: ops.Op, place: int, begin_s: float) -> OpSpan:
    return OpSpan(name=type(op).__name__, ops=(place,), begin_s=begin_s, end_s=time.perf_counter())


def _visible(
    item: SegmentInput, low: int, window: int | None, *, chunked: bool = False
) -> torch.Tensor:
    """Which of the KV slots ``[low, stop)`` each token of a segment sees."""
    return kernels.visible(
        query_positions_S=item.kv_positions_C[item.kv_start : item.kv_stop],
        key_positions_C=item.kv_positions_C[low : item.kv_stop],
        drafted_SD=item.drafted_SD,
        window=window,
        chunked=chunked,
    )
