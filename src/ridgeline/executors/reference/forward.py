"""Running the ops of a lowered model over a batch."""

import torch
from torch.nn import functional

from ridgeline.core import ops
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.reference.batch import Batch
from ridgeline.executors.reference.kv_cache import KVCache
from ridgeline.kernels import reference as kernels


class Forward:
    """One forward pass: the named buffers and the ops on them."""

    def __init__(self, model: ExecutorModel, cache: KVCache, batch: Batch) -> None:
        self._model = model
        self._cache = cache
        self._batch = batch
        self._buffers: dict[str, torch.Tensor] = {}

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
        logits = functional.linear(hidden_ND, self._weight(head.weight))
        return kernels.softcap(kernels.wide(logits), head.softcap)

    def _weight(self, weight: ops.Weight) -> torch.Tensor:
        return self._model.weights[weight.name]

    def _optional(self, weight: ops.Weight | None) -> torch.Tensor | None:
        return None if weight is None else self._model.weights[weight.name]

    def _step(self, op: ops.Op) -> None:
        buffers = self._buffers
        match op:
            case ops.Embed():
                rows = functional.embedding(self._batch.token_ids_T, self._weight(op.weight))
                buffers["x"] = rows * torch.tensor(op.scale, dtype=rows.dtype)
            case ops.Norm():
                weight = self._weight(op.weight)
                buffers[op.dst] = kernels.normalise(buffers[op.src], weight, op.spec)
            case ops.QKVProject():
                self._project_qkv(op)
            case ops.HeadNorm():
                for name, ref in (("q", op.query), ("k", op.key)):
                    gain = self._weight(ref)
                    buffers[name] = kernels.normalise(buffers[name], gain, op.spec)
            case ops.Rope():
                tables = kernels.rope_tables(
                    op.spec, self._batch.positions_T, self._batch.rope_lengths_T
                )
                for name in ("q", "k"):
                    buffers[name] = kernels.rotate(buffers[name], tables)
            case ops.KVWrite():
                self._write_kv(op)
            case ops.Attend():
                self._attend(op)
            case ops.OutProject():
                weight, bias = self._weight(op.weight), self._optional(op.bias)
                buffers["h"] = functional.linear(buffers["h"], weight, bias)
            case ops.MLP():
                buffers["h"] = self._mlp(op, buffers["h"])
            case ops.AddResidual():
                buffers["x"] = buffers["x"] + buffers["h"]
            case ops.Head():
                raise AssertionError("the head is run by `logits`, on the rows that are wanted")

    def _project_qkv(self, op: ops.QKVProject) -> None:
        for name, weight, bias, heads in (
            ("q", op.query, op.query_bias, op.num_heads),
            ("k", op.key, op.key_bias, op.num_kv_heads),
            ("v", op.value, op.value_bias, op.num_kv_heads),
        ):
            rows = functional.linear(self._buffers["h"], self._weight(weight), self._optional(bias))
            self._buffers[name] = rows.view(len(rows), heads, op.head_dim)

    def _write_kv(self, op: ops.KVWrite) -> None:
        rows = [
            item.state.kv_rows(
                self._batch.role,
                op.group,
                item.segment.start,
                item.segment.stop,
                self._cache.block_tokens,
            )
            for item in self._batch.segments
        ]
        self._cache.write(op.layer, torch.cat(rows), self._buffers["k"], self._buffers["v"])

    def _attend(self, op: ops.Attend) -> None:
        outputs = []
        for item, first, last in self._batch.ranges():
            positions = item.kv_positions_C
            start, stop = item.segment.start, item.segment.stop
            low = 0 if op.window is None else max(0, start - op.window + 1)
            rows = item.state.kv_rows(
                self._batch.role, op.group, low, stop, self._cache.block_tokens
            )
            k_CKd, v_CKd = self._cache.read(op.layer, rows)
            seen = kernels.visible(
                query_positions_S=positions[start:stop],
                key_positions_C=positions[low:stop],
                drafted_SD=item.drafted_SD,
                window=op.window,
            )
            q_SHd = self._buffers["q"][first:last]
            out = kernels.attend(q_SHd, k_CKd, v_CKd, seen, scale=op.scale, cap=op.softcap)
            outputs.append(out.flatten(1))
        self._buffers["h"] = torch.cat(outputs)

    def _mlp(self, op: ops.MLP, h_TD: torch.Tensor) -> torch.Tensor:
        up = functional.linear(h_TD, self._weight(op.up), self._optional(op.up_bias))
        if op.gate is None:
            inner = kernels.activate(up, op.activation)
        else:
            gate = functional.linear(h_TD, self._weight(op.gate), self._optional(op.gate_bias))
            inner = kernels.activate(gate, op.activation) * up
        return functional.linear(inner, self._weight(op.down), self._optional(op.down_bias))
