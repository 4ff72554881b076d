"""The reference's ops for those without a native kernel, on the same buffers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ridgeline.core import ops
from ridgeline.core.arrays import Array, cast
from ridgeline.executors.cpu.batch import CPUBatch
from ridgeline.executors.cpu.program import Program
from ridgeline.executors.reference.token_ops import TokenOps, Tokens, add_tokens
from ridgeline.kernels.cpu.structs import RlBuffer
from ridgeline.kernels.tensors import as_tensor
from ridgeline.weights import Adapter

_BUFFERS = {
    "x": RlBuffer.X,
    "h": RlBuffer.H,
    "n": RlBuffer.N,
    "shared": RlBuffer.SHARED,
    "q": RlBuffer.QUERY,
    "k": RlBuffer.KEY,
    "v": RlBuffer.VALUE,
    "inner": RlBuffer.INNER,
    "layers": RlBuffer.LAYERS,
    "streams": RlBuffer.STREAMS,
}


class FallbackOps:
    """Runs them for one program. ``weights`` are theirs, in float32."""

    def __init__(
        self, program: Program, weights: Mapping[str, Array], adapters: Sequence[Adapter]
    ) -> None:
        self._program = program
        self._weights = {name: as_tensor(values) for name, values in weights.items()}
        self._adapters = [
            {
                name: replace(lora, down=cast(lora.down, "float32"), up=cast(lora.up, "float32"))
                for name, lora in adapter.items()
                if name in weights
            }
            for adapter in adapters
        ]
        self._experts_read = 0
        self.expert_tokens: dict[str, Array] = {}  # as `Executor.expert_tokens`

    def take_experts_read(self) -> int:
        """Experts whose weights were read since the last call, summed over layers and steps."""
        read, self._experts_read = self._experts_read, 0
        return read

    def run(self, op: ops.Op, batch: CPUBatch) -> None:
        """Run one op over the rows of a batch, from the native buffers to the native buffers."""
        forward = TokenOps(self._weights, self._adapters, _tokens(batch))
        native = {
            name: torch.from_numpy(self._program.rows(_BUFFERS[name], batch.num_tokens))
            for name in _BUFFERS
        }
        for name, shape in _shapes(op, self._program.hidden_size).items():
            width = int(np.prod(shape))
            forward.buffers[name] = native[name][:, :width].view(-1, *shape)
        forward.buffers |= {name: native[name] for name in ("layers", "streams")}
        before = dict(forward.buffers)
        forward.step(op)
        for name, rows in forward.buffers.items():
            if rows is not before.get(name):
                flat = rows.flatten(1)
                native[name][:, : flat.shape[1]] = flat
        self._experts_read += forward.experts_read
        add_tokens(self.expert_tokens, forward.expert_tokens)


def _shapes(op: ops.Op, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Of what a token has in each buffer that the op may read."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("x", "h", "n", "shared"), (hidden_size,))
    match op:
        case ops.OutProject():
            shapes["h"] = (op.weight.shape[1],)
        case ops.Norm() if op.src == "inner":
            shapes["inner"] = (op.width(hidden_size),)
        case ops.Xielu():
            shapes["inner"] = (op.width,)
        case ops.Down():
            shapes["inner"] = (op.weight.shape[1],)
        case ops.GateHeads():
            shapes["h"] = (op.weight.shape[0],)
        case ops.HeadNorm():
            shapes["q"] = (op.num_heads, op.head_dim)
            shapes["k"] = (op.num_kv_heads, op.head_dim)
            if op.values:
                shapes["v"] = (op.num_kv_heads, op.head_dim)
        case ops.GrowQueries():
            shapes["q"] = (op.num_heads, op.head_dim)
        case ops.Rope():
            shapes["q"] = (op.num_heads, op.head_dim)
            shapes["k"] = (op.num_kv_heads, op.key_dim)
    return shapes


def _tokens(batch: CPUBatch) -> Tokens:
    lengths: list[int] = []
    adapters, row = [], 0
    for state, count in zip(batch.states, batch.num_own, strict=True):
        stop = row + count
        lengths += [state.rope_length(position) for position in batch.positions[row:stop].tolist()]
        adapters.append((state.admission.adapter, row, stop))
        row = stop
    return Tokens(
        ids_T=torch.from_numpy(batch.token_ids),
        positions_T=torch.from_numpy(batch.positions),
        rope_lengths_T=torch.tensor(lengths),
        adapters=adapters,
        types_T=torch.from_numpy(batch.token_types),
    )
