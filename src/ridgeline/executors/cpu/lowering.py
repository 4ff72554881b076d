"""From a model's ops to native ones."""

import ctypes
from collections.abc import Callable, Sequence
from functools import singledispatchmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.core import ops
from ridgeline.core.cache_groups import kv_groups
from ridgeline.core.rope_spec import RopeSpec
from ridgeline.core.spec import ModelSpec, NormKind, NormScope, NormSpec
from ridgeline.executors.cpu.op_structs import (
    activation_struct,
    norm_struct,
    routing_struct,
    xielu_struct,
)
from ridgeline.executors.cpu.ropes import depends_on_length
from ridgeline.executors.cpu.weights import PackedWeights
from ridgeline.kernels.cpu.matrix import PackedMatrix
from ridgeline.kernels.cpu.structs import (
    RlAttention,
    RlBuffer,
    RlGatedDelta,
    RlLinear,
    RlMatrix,
    RlSelectiveScan,
)
from ridgeline.models import inverse_frequencies, rope_attention_factor

BUFFERS = {
    "x": RlBuffer.X,
    "h": RlBuffer.H,
    "n": RlBuffer.N,
    "shared": RlBuffer.SHARED,
    "inner": RlBuffer.INNER,
}
_SCOPES = {NormScope.HEAD: 0, NormScope.EACH_HEAD: 1, NormScope.PROJECTION: 2}


class NativeLowering:
    """Appends native ops to a program (``handle``), which points to what is kept here and in
    ``weights``. ``routers`` has the native op of each router; `Program` says what the others are.
    """

    def __init__(
        self, library: ctypes.CDLL, handle: int, spec: ModelSpec, weights: PackedWeights
    ) -> None:
        self._lib, self._handle, self._weights = library, handle, weights
        self._hidden_size, self._groups = spec.hidden_size, kv_groups(spec)
        self._kept: list[Any] = []
        self.ropes: list[RopeSpec] = []
        self.slots: dict[str, int] = {}
        self.routers: dict[str, int] = {}
        self.num_ops = 0
        self._before: ops.Op | None = None

    def add(self, op: ops.Op) -> None:
        """Append what runs one op, which does not fall back."""
        self._add(op)
        self._before = op

    def _append(self, function: Callable[..., int], *arguments: object) -> int:
        """Call one of ``rl_add_*``; its op's index."""
        index = function(self._handle, *arguments)
        self.num_ops = index + 1
        return index

    @singledispatchmethod
    def _add(self, op: ops.Op) -> None:
        raise AssertionError(f"no kernel for {op}, which does not fall back")

    @_add.register
    def _(self, op: ops.Embed) -> None:
        self._append(
            self._lib.rl_add_embed, self._matrix(op.weight), op.first_token, op.scale,
            self._vector(op.positions, first_row=op.first_position), self._vector(op.types),
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.Norm) -> None:
        gain, bias = self._vector(op.weight), self._vector(op.bias)
        if op.scale != 1.0:
            gain, bias = self._scaled_norm(op)
        self._append(
            self._lib.rl_add_norm, BUFFERS[op.src], BUFFERS[op.dst],
            self._keep(norm_struct(op.spec)), gain, bias, op.width(self._hidden_size),
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.QKVProject) -> None:
        self._append(
            self._lib.rl_add_qkv, BUFFERS[op.src], self._linear(op.query, op.query_bias),
            self._or_empty(op.key, op.key_bias, op.query),
            self._or_empty(op.value or op.key, op.value_bias or op.key_bias, op.query),
            op.clip or 0.0,
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.HeadNorm) -> None:
        self._append(
            self._lib.rl_add_head_norm, self._keep(norm_struct(op.spec)), _SCOPES[op.scope],
            self._vector(op.query), self._vector(op.key), self._vector(op.query_bias),
            self._vector(op.key_bias), op.num_heads, op.num_kv_heads, op.head_dim, op.values,
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.Rope) -> None:
        self._append(
            self._lib.rl_add_rope, self._rope_table(op.spec), op.spec.interleaved, op.num_heads,
            op.num_kv_heads, op.head_dim, op.key_dim, op.query_start, op.key_start,
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.KVWrite) -> None:
        self._append(self._lib.rl_add_kv_write, op.group, self._layer(op.group, op.layer))

    @_add.register
    def _(self, op: ops.GrowQueries) -> None:
        rate, length, offset = op.growth.rate, op.growth.length, op.growth.offset
        width = op.num_heads * op.head_dim
        self._append(self._lib.rl_add_grow_queries, rate, length, offset, width)

    @_add.register
    def _(self, op: ops.Attend) -> None:
        attention = RlAttention(
            num_heads=op.num_heads, out_width=op.head_dim, scale=op.scale,
            softcap=op.softcap or 0.0, window=op.window or 0, sinks=self._vector(op.sinks),
            chunked=op.chunked,
        )  # fmt: skip
        layer = self._layer(op.group, op.layer)
        self._append(self._lib.rl_add_attend, op.group, layer, self._keep(attention))

    @_add.register
    def _(self, op: ops.BidirectionalAttend) -> None:
        attention = RlAttention(
            num_heads=op.num_heads, out_width=op.head_dim, scale=op.scale,
            softcap=op.softcap or 0.0, window=op.window or 0,
        )  # fmt: skip
        self._append(self._lib.rl_add_bidirectional_attend, op.num_kv_heads, self._keep(attention))

    @_add.register
    def _(self, op: ops.LatentProject) -> None:
        self._append(
            self._lib.rl_add_latent_project, BUFFERS[op.src],
            self._optional(op.query_latent, op.query_latent_bias), self._vector(op.query_norm),
            self._linear(op.query), self._linear(op.latent, op.latent_bias),
            self._vector(op.latent_norm), op.latent_norm.shape[0],
            self._keep(norm_struct(op.norm)),
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.LatentAttend) -> None:
        attention = RlAttention(num_heads=op.num_heads, out_width=op.latent_dim, scale=op.scale)
        parts = (self._stack(f"{op.expand.name}/{kind}", None) for kind in ("key", "value"))
        self._append(
            self._lib.rl_add_latent_attend, op.group, self._layer(op.group, op.layer),
            self._keep(attention), *parts, op.nope_dim, op.rope_dim,
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.ConvProject) -> None:
        self._append(
            self._lib.rl_add_qkv, BUFFERS[op.src], self._linear(op.in_gate, op.in_gate_bias),
            self._linear(op.out_gate, op.out_gate_bias), self._linear(op.value, op.value_bias),
            0.0,
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.DeltaProject) -> None:
        parts = (op.query, op.key, op.value, op.gate, op.beta, op.decay)
        self._append(self._lib.rl_add_delta_project, BUFFERS[op.src], *map(self._linear, parts))

    @_add.register
    def _(self, op: ops.GatedDelta) -> None:
        shape = RlGatedDelta(
            num_key_heads=op.num_key_heads, num_value_heads=op.num_value_heads,
            key_dim=op.key_dim, value_dim=op.value_dim, conv_length=op.conv.shape[1],
        )  # fmt: skip
        vectors = map(self._vector, (op.conv, op.decay_log, op.decay_bias, op.gain))
        self._append(
            self._lib.rl_add_gated_delta, op.offset, self._keep(shape), *vectors,
            self._keep(norm_struct(op.norm)),
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.ScanProject) -> None:
        self._append(
            self._lib.rl_add_qkv, BUFFERS[op.src], self._linear(op.mixed, op.mixed_bias),
            self._linear(op.gate, op.gate_bias), self._linear(op.step, op.step_bias), 0.0,
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.SelectiveScan) -> None:
        scan = RlSelectiveScan(
            num_heads=op.num_heads, head_dim=op.head_dim, num_groups=op.num_groups,
            state_dim=op.state_dim, conv_length=op.conv.shape[1],
        )  # fmt: skip
        conv, gain, norm = self._vector(op.conv), self._vector(op.gain), op.norm
        if set(op.input_scales) != {1.0}:
            conv = self._keep_vector(
                self._weights.vectors[op.conv.name] * op.conv_scales[:, np.newaxis]
            )
        if norm is None:  # the kernel has one: x · 2^50 / (mean of squares + 2^100)^½ is x itself
            norm = NormSpec(kind=NormKind.RMS, eps=2.0**100)
            gain = self._keep_vector(np.full(op.num_heads * op.head_dim, 2.0**50, dtype=np.float32))
        vectors = map(self._vector, (op.conv_bias, op.decay_log, op.step_offset, op.skip))
        self._append(
            self._lib.rl_add_selective_scan, op.offset, self._keep(scan), conv, *vectors, gain,
            self._keep(norm_struct(norm)),
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.GateHeads) -> None:
        self._append(self._lib.rl_add_gate_heads, BUFFERS[op.src], self._linear(op.weight, op.bias))

    @_add.register
    def _(self, op: ops.ShortConv) -> None:
        self._append(
            self._lib.rl_add_short_conv, op.offset, *op.weight.shape, self._vector(op.weight),
            self._vector(op.bias),
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.OutProject) -> None:
        self._append(self._lib.rl_add_out_project, self._linear(op.weight, op.bias))

    @_add.register
    def _(self, op: ops.MLP) -> None:
        self._append(
            self._lib.rl_add_mlp, BUFFERS[op.src], RlBuffer.H,
            self._optional(op.gate, op.gate_bias), self._linear(op.up, op.up_bias),
            self._linear(op.down, op.down_bias), self._keep(activation_struct(op.activation)), None,
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.SharedExpert) -> None:
        self._append(
            self._lib.rl_add_mlp, BUFFERS[op.src], RlBuffer.SHARED, self._optional(op.gate),
            self._linear(op.up), self._linear(op.down),
            self._keep(activation_struct(op.activation)), self._vector(op.output_gate),
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.GateUp) -> None:
        self._append(
            self._lib.rl_add_gate_up, BUFFERS[op.src], self._optional(op.gate, op.gate_bias),
            self._linear(op.up, op.up_bias), self._keep(activation_struct(op.activation)),
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.SparseGateUp) -> None:
        self._append(
            self._lib.rl_add_sparse_gate_up, BUFFERS[op.src], self._linear(op.gate),
            self._linear(op.up), self._keep(activation_struct(op.activation)), op.cutoff,
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.Xielu) -> None:
        xielu = self._keep(xielu_struct(op, self._weights.vectors))
        self._append(self._lib.rl_add_xielu, xielu, op.width)

    @_add.register
    def _(self, op: ops.Down) -> None:
        self._append(
            self._lib.rl_add_down, BUFFERS[op.dst], self._linear(op.weight, op.bias),
            BUFFERS[op.src], self._vector(op.output_gate),
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.MoE) -> None:
        self.routers[op.router.name] = self._append(
            self._lib.rl_add_moe, BUFFERS[op.src], BUFFERS[op.router_src or op.src],
            self._keep(routing_struct(op.routing, op.router)),
            self._linear(op.router, op.router_bias), self._vector(op.correction_bias),
            self._vector(op.expert_scale),
            op.gate and self._stack(op.gate.name, op.gate_bias),
            self._stack(op.up.name, op.up_bias),
            self._stack(op.down.name, op.down_bias),
            self._keep(activation_struct(op.activation)),
            self._borders(op.borders) if op.borders else None,
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.AddShared) -> None:
        self._append(self._lib.rl_add_add_shared)

    @_add.register
    def _(self, op: ops.AddResidual) -> None:
        self._append(self._lib.rl_add_residual, op.scale)

    @_add.register
    def _(self, op: ops.ScaleHidden) -> None:
        self._append(self._lib.rl_add_scale_hidden, self._vector(op.weight))

    @_add.register
    def _(self, op: ops.LayerEmbed) -> None:
        self._append(
            self._lib.rl_add_layer_embed, self._matrix(op.table), self._linear(op.projection),
            self._vector(op.gain), self._keep(norm_struct(op.norm)), op.width,
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.LayerInput) -> None:
        self._append(
            self._lib.rl_add_layer_input, self._linear(op.gate), self._linear(op.up),
            self._keep(activation_struct(op.activation)), op.first,
        )  # fmt: skip

    @_add.register
    def _(self, op: ops.SplitStreams) -> None:
        self._append(self._lib.rl_add_split_streams, *self._linears(op.weights))

    @_add.register
    def _(self, op: ops.JoinStreams) -> None:
        self._append(self._lib.rl_add_join_streams, *self._linears(op.weights))

    @_add.register
    def _(self, op: ops.AddToStreams) -> None:
        self._append(self._lib.rl_add_add_to_streams, op.num_streams)

    @_add.register
    def _(self, op: ops.PredictStreams) -> None:
        self._append(self._lib.rl_add_predict_streams, *self._stream_router(op))

    @_add.register
    def _(self, op: ops.CorrectStreams) -> None:
        scale = self._vector(op.scale)
        self._append(self._lib.rl_add_correct_streams, *self._stream_router(op), scale)

    @_add.register
    def _(self, op: ops.AddLaurel) -> None:
        self._append(self._lib.rl_add_add_laurel)

    @_add.register
    def _(self, op: ops.Gather) -> None:
        # Attention leaves its rows dense, and the product after it reads them so.
        is_dense = op.buffer == "h" and isinstance(self._before, ops.AttentionOp)
        borders = self._borders(op.borders)
        self._append(self._lib.rl_add_gather, BUFFERS[op.buffer], borders, is_dense)

    @_add.register
    def _(self, op: ops.GatherTokens) -> None:
        self._append(self._lib.rl_add_gather_tokens, self._borders(op.borders), op.hidden_size)

    @_add.register
    def _(self, op: ops.GatherRanges) -> None:
        self._append(self._lib.rl_add_gather_ranges, RlBuffer.H, op.hidden_size)

    @_add.register
    def _(self, op: ops.GatherLogits) -> None:
        self._lib.rl_set_gather_logits(self._handle, self._borders(op.borders))

    @_add.register
    def _(self, op: ops.Head) -> None:
        linear, softcap = self._linear(op.weight, op.bias), op.softcap or 0.0
        self._lib.rl_set_head(self._handle, linear, op.scale, softcap)

    def _scaled_norm(self, op: ops.Norm) -> tuple[int, int | None]:
        """The gain and the bias of a norm whose output is scaled."""
        vectors, offset = self._weights.vectors, np.float32(op.spec.unit_offset)
        ones = np.ones(self._hidden_size, dtype=np.float32)
        gain = ones if op.weight is None else vectors[op.weight.name]
        bias = None if op.bias is None else self._keep_vector(vectors[op.bias.name] * op.scale)
        return self._keep_vector((gain + offset) * op.scale - offset), bias

    def _keep_vector(self, values: npt.NDArray[np.float32]) -> int:
        assert values.dtype == np.float32
        self._kept.append(np.ascontiguousarray(values))
        return int(self._kept[-1].ctypes.data)

    def _borders(self, borders: Sequence[int]) -> Any:
        return ctypes.byref((ctypes.c_int32 * len(borders))(*borders))  # which is copied

    def _keep(self, struct: ctypes.Structure) -> Any:
        self._kept.append(struct)
        return ctypes.byref(struct)

    def _vector(self, weight: ops.Weight | None, *, first_row: int = 0) -> int | None:
        if weight is None:
            return None
        return self._weights.vectors[weight.name][first_row:].ctypes.data

    def _packed(self, weight: ops.Weight) -> PackedMatrix:
        (matrix,) = self._weights.matrices[weight.name]
        return matrix

    def _matrix(self, weight: ops.Weight) -> Any:
        return self._keep(self._packed(weight).struct)

    def _linear(self, weight: ops.Weight, bias: ops.Weight | None = None) -> Any:
        slot = self.slots.setdefault(weight.name, len(self.slots) + 1)
        return self._keep(
            RlLinear(matrix=self._packed(weight).struct, bias=self._vector(bias), slot=slot)
        )

    def _linears(self, weights: Sequence[ops.Weight]) -> tuple[Any, int]:
        """Pointers to products, which are copied, and how many."""
        addresses = [ctypes.addressof(self._linear(weight)._obj) for weight in weights]
        return (ctypes.c_void_p * len(addresses))(*addresses), len(addresses)

    def _stream_router(self, op: ops.PredictStreams | ops.CorrectStreams) -> tuple[Any, ...]:
        norm = self._keep(norm_struct(op.norm))
        return self._linear(op.router), self._vector(op.gain), norm, self._vector(op.coefs)

    def _optional(self, weight: ops.Weight | None, bias: ops.Weight | None = None) -> Any:
        return None if weight is None else self._linear(weight, bias)

    def _or_empty(
        self, weight: ops.Weight | None, bias: ops.Weight | None, like: ops.Weight
    ) -> Any:
        """A product, or one without rows of a matrix like another."""
        if weight is not None:
            return self._linear(weight, bias)
        empty = RlMatrix.from_buffer_copy(self._packed(like).struct)
        empty.rows = 0
        return self._keep(RlLinear(matrix=empty))

    def _stack(self, name: str, bias: ops.Weight | None) -> Any:
        """One product for each matrix of a stack, with the rows of a stacked bias."""
        matrices = self._weights.matrices[name]
        address, row_bytes = self._vector(bias), 0
        if bias is not None:
            row_bytes = 4 * bias.shape[-1]
        array = (RlLinear * len(matrices))(
            *(
                RlLinear(
                    matrix=matrix.struct,
                    bias=None if address is None else address + index * row_bytes,
                )
                for index, matrix in enumerate(matrices)
            )
        )
        self._kept.append(array)
        return ctypes.cast(array, ctypes.c_void_p)

    def _layer(self, group: int, layer: int) -> int:
        """A layer's place within its KV group."""
        return self._groups[group].layers.index(layer)

    def _rope_table(self, spec: RopeSpec) -> int:
        if spec not in self.ropes:
            frequencies = None
            if not depends_on_length(spec):
                frequencies = inverse_frequencies(spec, sequence_length=0)
                assert frequencies.dtype == np.float32
            self._lib.rl_add_rope_table(
                self._handle,
                None if frequencies is None else frequencies.ctypes.data,
                spec.rotary_dim // 2,
                rope_attention_factor(spec),
            )
            self.ropes.append(spec)
        return self.ropes.index(spec)


def lowered_ops() -> tuple[type, ...]:
    """The kinds of ops that `NativeLowering.add` takes."""
    kinds = vars(NativeLowering)["_add"].dispatcher.registry
    return tuple(kind for kind in kinds if kind is not object)
