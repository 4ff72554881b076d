"""From a model's ops to a program of native ones."""

import ctypes
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.core import ops
from ridgeline.core.cache_groups import kv_groups
from ridgeline.core.errors import EngineError, OutOfMemoryError
from ridgeline.core.rope_spec import RopeSpec
from ridgeline.core.spec import ModelSpec, NormKind, NormScope, NormSpec
from ridgeline.executors.cpu.op_structs import (
    activation_struct,
    norm_struct,
    routing_struct,
    widths,
    xielu_struct,
)
from ridgeline.executors.cpu.ropes import depends_on_length
from ridgeline.executors.cpu.streaming import StreamedWeights
from ridgeline.executors.cpu.weights import PackedWeights
from ridgeline.kernels.cpu.group import RankGroup
from ridgeline.kernels.cpu.matrix import PackedMatrix
from ridgeline.kernels.cpu.pool import Pool
from ridgeline.kernels.cpu.structs import (
    RlAttention,
    RlBatch,
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
_FLOATS = ctypes.POINTER(ctypes.c_float)
_SCOPES = {NormScope.HEAD: 0, NormScope.EACH_HEAD: 1, NormScope.PROJECTION: 2}


class Program:
    """The native ops of a model, without its LM head, which `head` runs on chosen rows.

    ``ropes`` are the rotary tables in their order; those whose frequencies depend on a sequence's
    length come from the caller, step by step. ``fallbacks`` are ops without a kernel. The caller
    runs them, those between a pipeline's stages and those on features: `caller_ops`, each with the
    number of native ops before it. ``group`` are the ranks that a model's ops exchange with.
    """

    def __init__(
        self,
        pool: Pool,
        spec: ModelSpec,
        model_ops: Sequence[ops.Op],
        weights: PackedWeights,
        fallbacks: Collection[ops.Op] = (),
        group: RankGroup | None = None,
    ) -> None:
        self._pool, self._library, self._weights = pool, pool.library, weights
        self.hidden_size, self._groups = spec.hidden_size, kv_groups(spec)
        self._kept: list[Any] = []  # what the program points to
        self.ropes: list[RopeSpec] = []
        self.slots: dict[str, int] = {}  # products that adapters may change, by weight
        self._widths = widths(spec, model_ops)
        self._handle = self._library.rl_program_new((ctypes.c_int32 * len(RlBuffer))(*self._widths))
        if not self._handle:
            raise OutOfMemoryError("No memory for the program of a model.")
        if group is not None:
            self._library.rl_set_group(self._handle, group.handle)
            self._kept.append(group)
        self._num_ops = 0
        self._moe: dict[str, int] = {}  # the native op of each router
        self._is_attention = False  # the op before
        self.native: list[int] = []  # the place of each native op among the model's
        self.caller_ops: list[tuple[int, ops.Op]] = []
        self.attends: list[tuple[int, ops.Op]] = []  # each with the number of native ops so far
        for place, op in enumerate(model_ops):
            if op in fallbacks or isinstance(op, ops.StageOp | ops.FeatureOp):
                self.caller_ops.append((self._num_ops, op))
            elif not isinstance(op, ops.GatherContext | ops.GatherSplits):  # of the op before
                self.native.append(place)
                self._add(op)
            if isinstance(op, ops.Attend):
                self.attends.append((self._num_ops, op))
        self._reserved = 0
        self._streamed: StreamedWeights | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether weights are read from disk in every step."""
        return self._streamed is not None

    def stream(self, weights: StreamedWeights) -> None:
        """Have weights in memory only while they are used."""
        self._streamed = weights

    def reserve(self, num_tokens: int) -> None:
        """Make room for batches of that many tokens.

        Raises:
            OutOfMemoryError: there is none.
        """
        if num_tokens > self._reserved:
            self._reserved = 0  # what a failure leaves
            if self._library.rl_reserve(self._handle, num_tokens):
                raise OutOfMemoryError(f"No memory for a step of {num_tokens} tokens.")
            self._reserved = num_tokens

    def run(
        self,
        batch: RlBatch,
        groups: Any,
        cos_sin: Any,
        adapters: Any,
        run_op: Callable[[ops.Op], None],
        after: Sequence[tuple[int, ops.Op]] = (),
    ) -> None:
        """All ops over a batch that `reserve` has made room for.

        ``run_op`` gets `caller_ops`, and after they have run those of ``after``, which are
        `attends` or none.
        """

        def run_native(first: int, last: int) -> None:
            failed = self._library.rl_run(
                self._handle, self._pool.handle, first, last, ctypes.byref(batch), groups, cos_sin,
                adapters,
            )  # fmt: skip
            if failed:
                raise EngineError("A step ran out of memory.")

        stops = sorted((*after, *self.caller_ops), key=lambda stop: stop[0])

        def run_between(first: int, last: int, stops: Iterable[tuple[int, ops.Op]]) -> None:
            for stop, op in stops:
                run_native(first, stop)
                run_op(op)
                first = stop
            run_native(first, last)

        if self._streamed is None:
            run_between(0, self._num_ops, stops)
            return
        self._streamed.run(
            lambda first, last: run_between(first, last, (s for s in stops if first < s[0] <= last))
        )

    def head(self, rows: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> None:
        """Logits ``[N, V]`` of some rows of the batch."""
        failed = self._library.rl_head(
            self._handle, self._pool.handle, rows.ctypes.data, len(rows), logits.ctypes.data
        )
        if failed:
            raise EngineError("A step ran out of memory.")

    def decode(
        self,
        batch: RlBatch,
        groups: Any,
        adapters: Any,
        draws: npt.NDArray[np.void],
        num_steps: int,
        abort: ctypes.c_int32,
    ) -> npt.NDArray[np.int32]:
        """Tokens ``[steps done, S]`` of decode steps run without returning; −1 where none is."""
        tokens = np.empty((num_steps, len(draws)), dtype=np.int32)
        done = self._library.rl_decode(
            self._handle, self._pool.handle, ctypes.byref(batch), groups, adapters,
            draws.ctypes.data, num_steps, ctypes.byref(abort), tokens.ctypes.data,
        )  # fmt: skip
        if done < 0:
            raise EngineError("A step ran out of memory.")
        return tokens[:done]

    def take_experts_read(self) -> int:
        """Experts whose weights were read since the last call, summed over layers and steps."""
        return int(self._library.rl_take_experts_read(self._handle))

    def expert_tokens(self, op: ops.MoE) -> npt.NDArray[np.int64]:
        """Tokens that an op that is native has sent to each expert so far."""
        counts = np.zeros(op.router.shape[0], dtype=np.int64)
        self._library.rl_expert_tokens(self._handle, self._moe[op.router.name], counts.ctypes.data)
        return counts

    def rows(self, buffer: RlBuffer, num_tokens: int) -> npt.NDArray[np.float32]:
        """The first rows of a buffer itself, ``[num_tokens, its width]``."""
        address = self._library.rl_buffer(self._handle, buffer)
        shape = (num_tokens, self._widths[buffer])
        return np.ctypeslib.as_array(ctypes.cast(address, _FLOATS), shape)

    def close(self) -> None:
        if self._streamed is not None:
            self._streamed.close()
        self._library.rl_program_free(self._handle)
        self._kept.clear()

    def _add(self, op: ops.Op) -> None:
        library, handle = self._library, self._handle
        match op:
            case ops.Embed():
                library.rl_add_embed(
                    handle, self._matrix(op.weight), op.first_token, op.scale,
                    self._vector(op.positions, first_row=op.first_position), self._vector(op.types),
                )  # fmt: skip
            case ops.Norm():
                gain, bias = self._vector(op.weight), self._vector(op.bias)
                if op.scale != 1.0:
                    gain, bias = self._scaled_norm(op)
                library.rl_add_norm(
                    handle, BUFFERS[op.src], BUFFERS[op.dst], self._keep(norm_struct(op.spec)),
                    gain, bias, op.width(self.hidden_size),
                )  # fmt: skip
            case ops.QKVProject():
                library.rl_add_qkv(
                    handle, BUFFERS[op.src], self._linear(op.query, op.query_bias),
                    self._or_empty(op.key, op.key_bias, op.query),
                    self._or_empty(op.value or op.key, op.value_bias or op.key_bias, op.query),
                    op.clip or 0.0,
                )  # fmt: skip
            case ops.HeadNorm():
                library.rl_add_head_norm(
                    handle, self._keep(norm_struct(op.spec)), _SCOPES[op.scope],
                    self._vector(op.query), self._vector(op.key), self._vector(op.query_bias),
                    self._vector(op.key_bias), op.num_heads, op.num_kv_heads, op.head_dim,
                    op.values,
                )  # fmt: skip
            case ops.Rope():
                library.rl_add_rope(
                    handle, self._rope_table(op.spec), op.spec.interleaved, op.num_heads,
                    op.num_kv_heads, op.head_dim, op.key_dim, op.query_start, op.key_start,
                )  # fmt: skip
            case ops.KVWrite():
                library.rl_add_kv_write(handle, op.group, self._layer(op.group, op.layer))
            case ops.GrowQueries():
                library.rl_add_grow_queries(
                    handle,
                    op.growth.rate,
                    op.growth.length,
                    op.growth.offset,
                    op.num_heads * op.head_dim,
                )
            case ops.Attend():
                attention = RlAttention(
                    num_heads=op.num_heads, out_width=op.head_dim, scale=op.scale,
                    softcap=op.softcap or 0.0, window=op.window or 0,
                    sinks=self._vector(op.sinks), chunked=op.chunked,
                )  # fmt: skip
                library.rl_add_attend(
                    handle, op.group, self._layer(op.group, op.layer), self._keep(attention)
                )
            case ops.BidirectionalAttend():
                attention = RlAttention(
                    num_heads=op.num_heads, out_width=op.head_dim, scale=op.scale,
                    softcap=op.softcap or 0.0, window=op.window or 0,
                )  # fmt: skip
                library.rl_add_bidirectional_attend(handle, op.num_kv_heads, self._keep(attention))
            case ops.LatentProject():
                library.rl_add_latent_project(
                    handle, BUFFERS[op.src],
                    self._optional(op.query_latent, op.query_latent_bias),
                    self._vector(op.query_norm), self._linear(op.query, None),
                    self._linear(op.latent, op.latent_bias), self._vector(op.latent_norm),
                    op.latent_norm.shape[0], self._keep(norm_struct(op.norm)),
                )  # fmt: skip
            case ops.LatentAttend():
                self._add_latent_attend(op)
            case ops.ConvProject():
                library.rl_add_qkv(
                    handle, BUFFERS[op.src], self._linear(op.in_gate, op.in_gate_bias),
                    self._linear(op.out_gate, op.out_gate_bias),
                    self._linear(op.value, op.value_bias), 0.0,
                )  # fmt: skip
            case ops.DeltaProject():
                parts = (op.query, op.key, op.value, op.gate, op.beta, op.decay)
                linears = (self._linear(part, None) for part in parts)
                library.rl_add_delta_project(handle, BUFFERS[op.src], *linears)
            case ops.GatedDelta():
                shape = RlGatedDelta(
                    num_key_heads=op.num_key_heads, num_value_heads=op.num_value_heads,
                    key_dim=op.key_dim, value_dim=op.value_dim, conv_length=op.conv.shape[1],
                )  # fmt: skip
                library.rl_add_gated_delta(
                    handle, op.offset, self._keep(shape), self._vector(op.conv),
                    self._vector(op.decay_log), self._vector(op.decay_bias),
                    self._vector(op.gain), self._keep(norm_struct(op.norm)),
                )  # fmt: skip
            case ops.ScanProject():
                library.rl_add_qkv(
                    handle, BUFFERS[op.src], self._linear(op.mixed, op.mixed_bias),
                    self._linear(op.gate, op.gate_bias), self._linear(op.step, op.step_bias), 0.0,
                )  # fmt: skip
            case ops.SelectiveScan():
                self._add_selective_scan(op)
            case ops.GateHeads():
                library.rl_add_gate_heads(handle, BUFFERS[op.src], self._linear(op.weight, op.bias))
            case ops.ShortConv():
                channels, length = op.weight.shape
                library.rl_add_short_conv(
                    handle, op.offset, channels, length, self._vector(op.weight),
                    self._vector(op.bias),
                )  # fmt: skip
            case ops.OutProject():
                library.rl_add_out_project(handle, self._linear(op.weight, op.bias))
            case ops.MLP():
                library.rl_add_mlp(
                    handle, BUFFERS[op.src], RlBuffer.H, self._optional(op.gate, op.gate_bias),
                    self._linear(op.up, op.up_bias), self._linear(op.down, op.down_bias),
                    self._keep(activation_struct(op.activation)), None,
                )  # fmt: skip
            case ops.GateUp():
                library.rl_add_gate_up(
                    handle, BUFFERS[op.src], self._optional(op.gate, op.gate_bias),
                    self._linear(op.up, op.up_bias), self._keep(activation_struct(op.activation)),
                )  # fmt: skip
            case ops.Xielu():
                library.rl_add_xielu(
                    handle, self._keep(xielu_struct(op, self._weights.vectors)), op.width
                )
            case ops.Down():
                library.rl_add_down(
                    handle, BUFFERS[op.dst], self._linear(op.weight, op.bias), BUFFERS[op.src],
                    self._vector(op.output_gate),
                )  # fmt: skip
            case ops.Gather():
                # Attention leaves its rows dense, and the product after it reads them so.
                is_dense = op.buffer == "h" and self._is_attention
                library.rl_add_gather(
                    handle, BUFFERS[op.buffer], self._borders(op.borders), is_dense
                )
            case ops.GatherTokens():
                library.rl_add_gather_tokens(handle, self._borders(op.borders), op.hidden_size)
            case ops.GatherRanges():
                library.rl_add_gather_ranges(handle, RlBuffer.H, op.hidden_size)
            case ops.GatherLogits():
                library.rl_set_gather_logits(handle, self._borders(op.borders))
                return
            case ops.SharedExpert():
                library.rl_add_mlp(
                    handle, BUFFERS[op.src], RlBuffer.SHARED, self._optional(op.gate, None),
                    self._linear(op.up, None), self._linear(op.down, None),
                    self._keep(activation_struct(op.activation)), self._vector(op.output_gate),
                )  # fmt: skip
            case ops.MoE():
                self._add_moe(op)
            case ops.AddShared():
                library.rl_add_add_shared(handle)
            case ops.AddResidual():
                library.rl_add_residual(handle, op.scale)
            case ops.LayerEmbed():
                library.rl_add_layer_embed(
                    handle, self._matrix(op.table), self._linear(op.projection, None),
                    self._vector(op.gain), self._keep(norm_struct(op.norm)), op.width,
                )  # fmt: skip
            case ops.LayerInput():
                library.rl_add_layer_input(
                    handle, self._linear(op.gate, None), self._linear(op.up, None),
                    self._keep(activation_struct(op.activation)), op.first,
                )  # fmt: skip
            case ops.SplitStreams():
                library.rl_add_split_streams(handle, self._linears(op.weights), len(op.weights))
            case ops.JoinStreams():
                library.rl_add_join_streams(handle, self._linears(op.weights), len(op.weights))
            case ops.AddToStreams():
                library.rl_add_add_to_streams(handle, op.num_streams)
            case ops.PredictStreams():
                library.rl_add_predict_streams(handle, *self._stream_router(op))
            case ops.CorrectStreams():
                library.rl_add_correct_streams(
                    handle, *self._stream_router(op), self._vector(op.scale)
                )
            case ops.AddLaurel():
                library.rl_add_add_laurel(handle)
            case ops.SparseGateUp():
                library.rl_add_sparse_gate_up(
                    handle, BUFFERS[op.src], self._linear(op.gate, None),
                    self._linear(op.up, None), self._keep(activation_struct(op.activation)),
                    op.cutoff,
                )  # fmt: skip
            case ops.ScaleHidden():
                library.rl_add_scale_hidden(handle, self._vector(op.weight))
            case ops.Head():
                library.rl_set_head(
                    handle, self._linear(op.weight, op.bias), op.scale, op.softcap or 0.0
                )
                return
            case _:
                raise AssertionError(f"no kernel for {op}, which does not fall back")
        self._is_attention = isinstance(op, ops.AttentionOp)
        self._num_ops += 1

    def _add_latent_attend(self, op: ops.LatentAttend) -> None:
        attention = RlAttention(
            num_heads=op.num_heads, out_width=op.latent_dim, scale=op.scale, softcap=0.0, window=0
        )
        parts = (self._stack(f"{op.expand.name}/{kind}", None) for kind in ("key", "value"))
        self._library.rl_add_latent_attend(
            self._handle, op.group, self._layer(op.group, op.layer), self._keep(attention), *parts,
            op.nope_dim, op.rope_dim,
        )  # fmt: skip

    def _add_moe(self, op: ops.MoE) -> None:
        self._moe[op.router.name] = self._library.rl_add_moe(
            self._handle, BUFFERS[op.src], BUFFERS[op.router_src or op.src],
            self._keep(routing_struct(op.routing, op.router)),
            self._linear(op.router, op.router_bias), self._vector(op.correction_bias),
            self._vector(op.expert_scale),
            op.gate and self._stack(op.gate.name, op.gate_bias),
            self._stack(op.up.name, op.up_bias),
            self._stack(op.down.name, op.down_bias),
            self._keep(activation_struct(op.activation)),
            self._borders(op.borders) if op.borders else None,
        )  # fmt: skip

    def _add_selective_scan(self, op: ops.SelectiveScan) -> None:
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
        self._library.rl_add_selective_scan(
            self._handle, op.offset, self._keep(scan), conv, *vectors, gain,
            self._keep(norm_struct(norm)),
        )  # fmt: skip

    def _scaled_norm(self, op: ops.Norm) -> tuple[int, int | None]:
        """The gain and the bias of a norm whose output is scaled."""
        vectors, offset = self._weights.vectors, np.float32(op.spec.unit_offset)
        ones = np.ones(self.hidden_size, dtype=np.float32)
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

    def _linear(self, weight: ops.Weight, bias: ops.Weight | None) -> Any:
        slot = self.slots.setdefault(weight.name, len(self.slots) + 1)
        return self._keep(
            RlLinear(matrix=self._packed(weight).struct, bias=self._vector(bias), slot=slot)
        )

    def _linears(self, weights: Sequence[ops.Weight]) -> Any:
        """Pointers to products, which are copied."""
        linears = [self._linear(weight, None) for weight in weights]
        return (ctypes.c_void_p * len(linears))(*(ctypes.addressof(each._obj) for each in linears))

    def _stream_router(self, op: ops.PredictStreams | ops.CorrectStreams) -> tuple[Any, ...]:
        norm = self._keep(norm_struct(op.norm))
        return self._linear(op.router, None), self._vector(op.gain), norm, self._vector(op.coefs)

    def _optional(self, weight: ops.Weight | None, bias: ops.Weight | None) -> Any:
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
            self._library.rl_add_rope_table(
                self._handle,
                None if frequencies is None else frequencies.ctypes.data,
                spec.rotary_dim // 2,
                rope_attention_factor(spec),
            )
            self.ropes.append(spec)
        return self.ropes.index(spec)
