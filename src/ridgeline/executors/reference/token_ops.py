"""The ops that look at each token alone: all but those on KV cache and states, and the head."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from ridgeline.core import ops
from ridgeline.core.arrays import Array
from ridgeline.core.rope_spec import RopeSpec
from ridgeline.executors.reference import latent
from ridgeline.executors.reference.experts import run_moe, run_shared
from ridgeline.kernels import reference as kernels
from ridgeline.kernels.tensors import as_array, as_tensor
from ridgeline.weights import Adapter

if TYPE_CHECKING:
    from ridgeline.kernels.cpu.group import RankGroup


class Tokens(NamedTuple):
    """The T tokens of a pass. ``rope_lengths_T`` are the lengths that rotary frequencies may depend
    on; ``adapters`` has the adapter slot, the first row and that behind the last of each segment.
    ``types_T`` are 1 for tokens of the second text of a pair.
    """

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    rope_lengths_T: torch.Tensor
    adapters: Sequence[tuple[int, int, int]]
    types_T: torch.Tensor


def add_tokens(counted: dict[str, Array], more: Mapping[str, Array]) -> None:
    """Add what a pass has counted (`Executor.expert_tokens`)."""
    for router, counts in more.items():
        counted[router] = counted.get(router, 0) + counts


class TokenOps:
    """Named buffers, and the ops on them. ``adapters[i]`` is that of slot i + 1; ``group`` are the
    ranks that a part of a model is computed with."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        adapters: Sequence[Adapter],
        tokens: Tokens,
        group: "RankGroup | None" = None,
    ) -> None:
        self._group = group
        self._weights = weights
        self._adapters = adapters
        self._tokens = tokens
        self.buffers: dict[str, torch.Tensor] = {}
        self.experts_read = 0  # summed over layers
        self.expert_tokens: dict[str, Array] = {}  # of this pass, by router
        self._tables: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = {}

    def step(self, op: ops.Op) -> None:
        """Run one op.

        Raises:
            NotImplementedError: it looks at more than single tokens, or there is no such op.
        """
        buffers = self.buffers
        match op:
            case ops.Embed():
                self._embed(op)
            case ops.Norm():
                weight, bias = self._optional(op.weight), self._optional(op.bias)
                rows = kernels.normalise(buffers[op.src], weight, op.spec, bias=bias)
                buffers[op.dst] = rows if op.scale == 1.0 else rows * op.scale
            case ops.QKVProject():
                self._project_qkv(op)
            case ops.ConvProject():
                self._project(
                    op.src,
                    (op.in_gate, op.in_gate_bias),
                    (op.out_gate, op.out_gate_bias),
                    (op.value, op.value_bias),
                )
            case ops.DeltaProject():
                self._project_delta(op)
            case ops.ScanProject():
                self._project(
                    op.src,
                    (op.mixed, op.mixed_bias),
                    (op.gate, op.gate_bias),
                    (op.step, op.step_bias),
                )
            case ops.GateHeads():
                gate = self._linear(buffers[op.src], op.weight, op.bias)
                buffers["h"] = buffers["h"] * torch.sigmoid(gate)
            case ops.HeadNorm():
                self._normalise_heads(op)
            case ops.Rope():
                self._rotate(op)
            case ops.GrowQueries():
                buffers["q"] = kernels.grow_queries(
                    buffers["q"], op.growth, self._tokens.positions_T
                )
            case ops.LatentProject():
                buffers["q"], buffers["k"] = latent.project(op, buffers[op.src], self._weight)
            case ops.MoE():
                buffers["h"] = self._moe(op)
            case ops.SharedExpert():
                buffers["shared"] = run_shared(op, buffers[op.src], self._weight)
            case ops.AddShared():
                buffers["h"] = buffers["h"] + buffers["shared"]
            case ops.OutProject():
                buffers["h"] = self._linear(buffers["h"], op.weight, op.bias)
            case ops.MLP():
                buffers["h"] = self._mlp(op, buffers[op.src])
            case ops.GateUp():
                buffers["inner"] = self._gate_up(op, buffers[op.src])
            case ops.Xielu():
                numbers = map(self._weight, (op.rise, op.fall, op.beta, op.eps))
                buffers["inner"] = kernels.xielu(buffers["inner"], *numbers)
            case ops.Down():
                buffers[op.dst] = self._down(op)
            case ops.Gather():
                buffers[op.buffer] = self._gather(op)
            case ops.GatherTokens():
                buffers["x"] = self._gather_tokens(op)
            case ops.AddResidual():
                buffers["x"] = buffers["x"] + buffers["h"] * op.scale
            case ops.LayerEmbed():
                buffers["layers"] = self._embed_layers(op)
            case ops.LayerInput():
                gate = self._linear(buffers["x"], op.gate)
                own = buffers["layers"][:, op.first : op.first + op.width]
                gated = kernels.gated(gate, own, op.activation)
                buffers["h"] = self._linear(gated, op.up)
            case ops.SparseGateUp():
                gate, up = (self._linear(buffers[op.src], part) for part in (op.gate, op.up))
                gate = kernels.above_cutoff(gate, op.cutoff)
                buffers["inner"] = kernels.gated(gate, up, op.activation)
            case _ if isinstance(op, ops.StreamOp):
                kernels.run_stream_op(op, buffers, self._linear, self._weight)
            case ops.AddLaurel():
                attended = buffers["x"] + buffers["h"]
                buffers["x"] = (attended + buffers["n"] + buffers["shared"]) * 2**-0.5
            case ops.ScaleHidden():
                buffers["x"] = buffers["x"] * self._weight(op.weight)
            case _:
                raise NotImplementedError(f"{type(op).__name__} is not an op on single tokens.")

    def gathered(self, own: torch.Tensor, op: ops.Gather | ops.GatherLogits) -> torch.Tensor:
        """Rows of all ranks, of which this one has its own columns."""
        assert self._group is not None
        return as_tensor(self._group.gather(as_array(own), op.borders))

    def _weight(self, weight: ops.Weight) -> torch.Tensor:
        return self._weights[weight.name]

    def _optional(self, weight: ops.Weight | None) -> torch.Tensor | None:
        return None if weight is None else self._weights[weight.name]

    def _linear(
        self, x_TI: torch.Tensor, weight: ops.Weight, bias: ops.Weight | None = None
    ) -> torch.Tensor:
        """x times a matrix, plus a bias, plus each sequence's adapter."""
        out_TO = functional.linear(x_TI, self._weight(weight), self._optional(bias))
        for slot, first, last in self._tokens.adapters:
            lora = self._adapters[slot - 1].get(weight.name) if slot else None
            if lora is not None:
                low_rank = functional.linear(x_TI[first:last], as_tensor(lora.down))
                out_TO[first:last] += functional.linear(low_rank, as_tensor(lora.up))
        return out_TO

    def _rope_tables(self, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
        if spec not in self._tables:
            tokens = self._tokens
            self._tables[spec] = kernels.rope_tables(
                spec, tokens.positions_T, tokens.rope_lengths_T
            )
        return self._tables[spec]

    def _embed(self, op: ops.Embed) -> None:
        buffers, tokens, table_VD = self.buffers, self._tokens, self._weight(op.weight)
        ids_T = (tokens.ids_T - op.first_token).clamp(0, len(table_VD) - 1)
        rows_TD = functional.embedding(ids_T, table_VD)
        buffers["x"] = rows_TD * torch.tensor(op.scale, dtype=rows_TD.dtype)
        if op.positions is not None:
            places_T = op.first_position + tokens.positions_T
            buffers["x"] += functional.embedding(places_T, self._weight(op.positions))
        if op.types is not None:
            buffers["x"] += functional.embedding(tokens.types_T, self._weight(op.types))

    def _embed_layers(self, op: ops.LayerEmbed) -> torch.Tensor:
        x_TD = self.buffers["x"]
        return kernels.mix_layer_inputs(
            self._linear(x_TD, op.projection),
            kernels.known_rows(self._tokens.ids_T, self._weight(op.table)),
            self._weight(op.gain),
            op.norm,
            hidden_size=x_TD.shape[1],
        )

    def _project(self, src: str, *products: tuple[ops.Weight, ops.Weight | None]) -> None:
        """One product, with its bias, into each of q, k and v."""
        source = self.buffers[src]
        for name, (weight, bias) in zip("qkv", products, strict=True):
            self.buffers[name] = self._linear(source, weight, bias)

    def _project_delta(self, op: ops.DeltaProject) -> None:
        source = self.buffers[op.src]
        for name, parts in (
            ("q", (op.query, op.key, op.value)),
            ("k", (op.gate,)),
            ("v", (op.beta, op.decay)),
        ):
            products = [self._linear(source, part) for part in parts]
            self.buffers[name] = torch.cat(products, dim=-1)

    def _project_qkv(self, op: ops.QKVProject) -> None:
        for name, weight, bias, heads in (
            ("q", op.query, op.query_bias, op.num_heads),
            ("k", op.key, op.key_bias, op.num_kv_heads),
            ("v", op.value, op.value_bias, op.num_kv_heads),
        ):
            if weight is None:
                continue
            rows = self._linear(self.buffers[op.src], weight, bias)
            if op.clip is not None:
                rows = rows.clamp(-op.clip, op.clip)
            self.buffers[name] = rows.view(len(rows), heads, op.head_dim)
        if op.value is None and op.key is not None:
            self.buffers["v"] = self.buffers["k"]

    def _normalise_heads(self, op: ops.HeadNorm) -> None:
        gains = [("q", op.query, op.query_bias), ("k", op.key, op.key_bias)]
        for name, gain, bias in gains if op.num_kv_heads else gains[:1]:
            self.buffers[name] = kernels.normalise_heads(
                self.buffers[name],
                self._optional(gain),
                op.spec,
                op.scope,
                bias=self._optional(bias),
            )
        if op.values:
            self.buffers["v"] = kernels.normalise(self.buffers["v"], None, op.spec)

    def _rotate(self, op: ops.Rope) -> None:
        tables, starts = self._rope_tables(op.spec), [("q", op.query_start), ("k", op.key_start)]
        for name, start in starts if op.num_kv_heads else starts[:1]:
            self.buffers[name] = kernels.rotate(
                self.buffers[name], tables, start=start, interleaved=op.spec.interleaved
            )

    def _moe(self, op: ops.MoE) -> torch.Tensor:
        source, routed = self.buffers[op.src], self.buffers[op.router_src or op.src]
        rows, counts = run_moe(op, source, self._weight, self._group, routed)
        self.experts_read += int(np.count_nonzero(counts))
        self.expert_tokens[op.router.name] = counts
        return rows

    def _mlp(self, op: ops.MLP, x_TD: torch.Tensor) -> torch.Tensor:
        return self._linear(self._gate_up(op, x_TD), op.down, op.down_bias)

    def _gate_up(self, op: ops.MLP | ops.GateUp, x_TD: torch.Tensor) -> torch.Tensor:
        up = self._linear(x_TD, op.up, op.up_bias)
        gate = None if op.gate is None else self._linear(x_TD, op.gate, op.gate_bias)
        return kernels.gated(gate, up, op.activation)

    def _down(self, op: ops.Down) -> torch.Tensor:
        rows = self._linear(self.buffers["inner"], op.weight, op.bias)
        if op.output_gate is None:
            return rows
        gates = functional.linear(self.buffers[op.src], self._weight(op.output_gate))
        return rows * torch.sigmoid(gates)

    def _gather(self, op: ops.Gather) -> torch.Tensor:
        own = self.buffers.get(op.buffer)
        if own is None:  # all of it is another rank's
            weight = next(iter(self._weights.values()))
            own = torch.empty(len(self._tokens.ids_T), 0, dtype=weight.dtype)
        return self.gathered(own, op)

    def _gather_tokens(self, op: ops.GatherTokens) -> torch.Tensor:
        assert self._group is not None
        first = torch.tensor(op.borders[1:-1])
        owners = torch.bucketize(self._tokens.ids_T, first, right=True).int()
        return as_tensor(self._group.gather_rows(as_array(self.buffers["x"]), owners.numpy()))
