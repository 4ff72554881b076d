"""Running the ops of a lowered model over a batch."""

from collections.abc import Mapping

import torch
from torch.nn import functional

from ridgeline.core import ops
from ridgeline.core.spec import RopeSpec
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.reference import latent
from ridgeline.executors.reference.batch import Batch, SegmentInput
from ridgeline.executors.reference.experts import run_moe, run_shared
from ridgeline.executors.reference.kv_cache import KVCache, kv_rows
from ridgeline.kernels import reference as kernels


class Forward:
    """One forward pass: the named buffers and the ops on them."""

    def __init__(
        self,
        model: ExecutorModel,
        weights: Mapping[str, torch.Tensor],
        cache: KVCache,
        batch: Batch,
    ) -> None:
        self._model = model
        self._weights = weights
        self._cache = cache
        self._batch = batch
        self.experts_read = 0  # summed over layers
        self._buffers: dict[str, torch.Tensor] = {}
        self._tables: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self) -> torch.Tensor:
        """Final hidden states ``[T, D]``, normed: the input of the LM head."""
        for op in self._model.ops:
            if not isinstance(op, ops.Head):
                self._step(op)
        return self._buffers["h"]

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits ``[N, V]`` of some rows of what `run` returned."""
        head = self._model.ops[-1]
        assert isinstance(head, ops.Head)
        logits = functional.linear(hidden_ND, self._weight(head.weight), self._optional(head.bias))
        return kernels.softcap(kernels.wide(logits) * head.scale, head.softcap)

    def _weight(self, weight: ops.Weight) -> torch.Tensor:
        return self._weights[weight.name]

    def _optional(self, weight: ops.Weight | None) -> torch.Tensor | None:
        return None if weight is None else self._weights[weight.name]

    def _linear(
        self, x_TI: torch.Tensor, weight: ops.Weight, bias: ops.Weight | None
    ) -> torch.Tensor:
        """x times a matrix, plus a bias, plus each sequence's adapter."""
        out_TO = functional.linear(x_TI, self._weight(weight), self._optional(bias))
        for item, first, last in self._batch.ranges():
            slot = item.state.admission.adapter
            lora = self._model.adapters[slot - 1].get(weight.name) if slot else None
            if lora is not None:
                low_rank = functional.linear(x_TI[first:last], lora.down)
                out_TO[first:last] += functional.linear(low_rank, lora.up)
        return out_TO

    def _rope_tables(self, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
        if spec not in self._tables:
            batch = self._batch
            self._tables[spec] = kernels.rope_tables(spec, batch.positions_T, batch.rope_lengths_T)
        return self._tables[spec]

    def _step(self, op: ops.Op) -> None:
        buffers = self._buffers
        match op:
            case ops.Embed():
                rows = functional.embedding(self._batch.token_ids_T, self._weight(op.weight))
                buffers["x"] = rows * torch.tensor(op.scale, dtype=rows.dtype)
                if op.positions is not None:
                    table = self._weight(op.positions)
                    buffers["x"] += functional.embedding(self._batch.positions_T, table)
            case ops.Norm():
                weight, bias = self._optional(op.weight), self._optional(op.bias)
                buffers[op.dst] = kernels.normalise(buffers[op.src], weight, op.spec, bias=bias)
            case ops.QKVProject():
                self._project_qkv(op)
            case ops.HeadNorm():
                for name, ref in (("q", op.query), ("k", op.key)):
                    buffers[name] = kernels.normalise_heads(
                        buffers[name], self._weight(ref), op.spec, op.scope
                    )
            case ops.Rope():
                tables = self._rope_tables(op.spec)
                for name, start in (("q", op.query_start), ("k", op.key_start)):
                    buffers[name] = kernels.rotate(
                        buffers[name], tables, start=start, interleaved=op.spec.interleaved
                    )
            case ops.KVWrite():
                self._write_kv(op)
            case ops.Attend():
                self._attend(op)
            case ops.LatentProject():
                buffers["q"], buffers["k"] = latent.project(op, buffers[op.src], self._weight)
            case ops.LatentAttend():
                self._attend_latent(op)
            case ops.MoE():
                buffers["h"], experts_read = run_moe(op, buffers[op.src], self._weight)
                self.experts_read += experts_read
            case ops.SharedExpert():
                buffers["shared"] = run_shared(op, buffers[op.src], self._weight)
            case ops.AddShared():
                buffers["h"] = buffers["h"] + buffers["shared"]
            case ops.OutProject():
                buffers["h"] = self._linear(buffers["h"], op.weight, op.bias)
            case ops.MLP():
                buffers["h"] = self._mlp(op, buffers[op.src])
            case ops.AddResidual():
                buffers["x"] = buffers["x"] + buffers["h"] * op.scale
            case ops.Head():
                raise AssertionError("the head is run by `logits`, on the rows that are wanted")

    def _project_qkv(self, op: ops.QKVProject) -> None:
        for name, weight, bias, heads in (
            ("q", op.query, op.query_bias, op.num_heads),
            ("k", op.key, op.key_bias, op.num_kv_heads),
            ("v", op.value, op.value_bias, op.num_kv_heads),
        ):
            rows = self._linear(self._buffers[op.src], weight, bias)
            if op.clip is not None:
                rows = rows.clamp(-op.clip, op.clip)
            self._buffers[name] = rows.view(len(rows), heads, op.head_dim)

    def _write_kv(self, op: ops.KVWrite) -> None:
        rows = [self._kv_rows(op.group, item, item.segment.start) for item in self._batch.segments]
        v_TKd = self._buffers["v"] if op.has_values else None
        self._cache.write(op.layer, torch.cat(rows), self._buffers["k"], v_TKd)

    def _attend(self, op: ops.Attend) -> None:
        sinks_H, outputs = self._optional(op.sinks), []
        for item, first, last in self._batch.ranges():
            low = 0 if op.window is None else max(0, item.segment.start - op.window + 1)
            k_CKd, v_CKd = self._read_kv(op, item, low)
            outputs.append(
                kernels.attend(
                    self._buffers["q"][first:last],
                    k_CKd,
                    v_CKd,
                    _visible(item, low, op.window),
                    scale=op.scale,
                    cap=op.softcap,
                    sinks_H=sinks_H,
                )
            )
        self._buffers["h"] = torch.cat(outputs).flatten(1)

    def _attend_latent(self, op: ops.LatentAttend) -> None:
        outputs = []
        for item, first, last in self._batch.ranges():
            latent_C1W, _ = self._read_kv(op, item, 0)
            q_SHd, seen = self._buffers["q"][first:last], _visible(item, 0, None)
            outputs.append(latent.attend(op, q_SHd, latent_C1W, seen, self._weight))
        self._buffers["h"] = torch.cat(outputs).flatten(1)

    def _read_kv(
        self, op: ops.Attend | ops.LatentAttend, item: SegmentInput, low: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of KV slots ``[low, stop)`` of a segment."""
        return self._cache.read(op.group, op.layer, self._kv_rows(op.group, item, low))

    def _kv_rows(self, group: int, item: SegmentInput, start: int) -> torch.Tensor:
        """Cache rows of KV slots ``[start, stop)`` of a segment."""
        table = item.state.tables[self._batch.role, group]
        return kv_rows(table, start, item.segment.stop, self._cache.block_tokens)

    def _mlp(self, op: ops.MLP, x_TD: torch.Tensor) -> torch.Tensor:
        up = self._linear(x_TD, op.up, op.up_bias)
        if op.gate is None:
            inner = kernels.activate(up, op.activation)
        else:
            gate = self._linear(x_TD, op.gate, op.gate_bias)
            inner = kernels.activate(gate, op.activation) * up
        return self._linear(inner, op.down, op.down_bias)


def _visible(item: SegmentInput, low: int, window: int | None) -> torch.Tensor:
    """Which of the KV slots ``[low, stop)`` each token of a segment sees."""
    return kernels.visible(
        query_positions_S=item.kv_positions_C[item.segment.start : item.segment.stop],
        key_positions_C=item.kv_positions_C[low : item.segment.stop],
        drafted_SD=item.drafted_SD,
        window=window,
    )
