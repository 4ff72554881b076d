"""Ops that have no native kernel: the reference's, between native ones, on the same buffers."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import torch

from ridgeline.core import ops
from ridgeline.core.errors import SettingsError
from ridgeline.executors.cpu.batch import CPUBatch
from ridgeline.executors.cpu.program import Program
from ridgeline.executors.reference.token_ops import TokenOps, Tokens
from ridgeline.kernels.cpu.structs import Buffer
from ridgeline.weights import Adapter

_log = logging.getLogger(__name__)

_BUFFERS = {
    "x": Buffer.X,
    "h": Buffer.H,
    "n": Buffer.N,
    "shared": Buffer.SHARED,
    "q": Buffer.QUERY,
    "k": Buffer.KEY,
    "v": Buffer.VALUE,
}
_NATIVE = (
    ops.Embed, ops.Norm, ops.QKVProject, ops.HeadNorm, ops.Rope, ops.KVWrite, ops.Attend,
    ops.LatentProject, ops.LatentAttend, ops.OutProject, ops.MLP, ops.SharedExpert, ops.MoE,
    ops.AddShared, ops.AddResidual, ops.Head,
)  # fmt: skip
_NEVER_CUT = (ops.KVWrite, ops.Attend, ops.LatentAttend, ops.Head)


def ops_without_kernel() -> tuple[str, ...]:
    """Names of all ops that the reference would have to run."""
    return tuple(kind.__name__ for kind in get_args(ops.Op) if kind not in _NATIVE)


def cut_ops(model_ops: Sequence[ops.Op]) -> tuple[ops.Op, ...]:
    """Those that the reference has to run, which the log says.

    Raises:
        SettingsError: one of them works on the KV cache, whose layout is the kernels' own, or
            is the head.
    """
    cuts = tuple(op for op in model_ops if not _is_native(op))
    for op in cuts:
        if isinstance(op, _NEVER_CUT):
            raise SettingsError(
                f"The cpu executor has no kernel for {type(op).__name__}, and the reference's "
                "cannot read its KV cache; use the reference executor."
            )
    if cuts:
        counts = Counter(type(op).__name__ for op in cuts)
        _log.warning(
            "The cpu executor has no kernel for %s: the reference runs them, slowly, and decode "
            "steps are not replayed.",
            ", ".join(f"{count} {name}" for name, count in counts.items()),
        )
    return cuts


def _is_native(op: ops.Op) -> bool:
    """Whether there is a kernel; those for the norms of heads add no bias."""
    return isinstance(op, _NATIVE) and not (isinstance(op, ops.HeadNorm) and op.query_bias)


class CutOps:
    """Runs them for one program. ``weights`` are theirs, in float32."""

    def __init__(
        self, program: Program, weights: dict[str, torch.Tensor], adapters: Sequence[Adapter]
    ) -> None:
        self._program, self._weights = program, weights
        self._adapters = [
            {
                name: replace(lora, down=lora.down.float(), up=lora.up.float())
                for name, lora in adapter.items()
                if name in weights
            }
            for adapter in adapters
        ]
        self._experts_read = 0

    def take_experts_read(self) -> int:
        """Experts whose weights were read since the last call, summed over layers and steps."""
        read, self._experts_read = self._experts_read, 0
        return read

    def run(self, op: ops.Op, batch: CPUBatch) -> None:
        """Run one op over the rows of a batch, from the native buffers to the native buffers."""
        forward = TokenOps(self._weights, self._adapters, _tokens(batch))
        hidden = self._program.hidden_size
        native = {
            name: torch.from_numpy(self._program.rows(_BUFFERS[name], batch.num_tokens))
            for name in _BUFFERS
        }
        for name, shape in _shapes(op, hidden).items():
            width = int(np.prod(shape))
            forward.buffers[name] = native[name][:, :width].view(-1, *shape)
        before = dict(forward.buffers)
        forward.step(op)
        for name, rows in forward.buffers.items():
            if rows is not before.get(name):
                flat = rows.flatten(1)
                native[name][:, : flat.shape[1]] = flat
        self._experts_read += forward.experts_read


def _shapes(op: ops.Op, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Of what a token has in each buffer that the op may read."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("x", "h", "n", "shared"), (hidden_size,))
    match op:
        case ops.OutProject():
            shapes["h"] = (op.weight.shape[1],)
        case ops.HeadNorm():
            shapes["q"] = (op.num_heads, op.head_dim)
            shapes["k"] = (op.num_kv_heads, op.head_dim)
        case ops.Rope():
            shapes["q"] = (op.num_heads, op.head_dim)
            shapes["k"] = (op.num_kv_heads, op.key_dim)
    return shapes


def _tokens(batch: CPUBatch) -> Tokens:
    lengths: list[int] = []
    adapters, row = [], 0
    for item, state in zip(batch.items, batch.states, strict=True):
        stop = row + item.segment.num_tokens
        lengths += [state.rope_length(position) for position in batch.positions[row:stop].tolist()]
        adapters.append((state.admission.adapter, row, stop))
        row = stop
    return Tokens(
        ids_T=torch.from_numpy(batch.token_ids),
        positions_T=torch.from_numpy(batch.positions),
        rope_lengths_T=torch.tensor(lengths),
        adapters=adapters,
    )
