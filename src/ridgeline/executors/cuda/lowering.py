"""From a model's ops to calls on the device.

Ops that follow each other are joined as they are lowered: a residual goes into the product that
makes its branch, norms of heads, rotation and the write to the KV cache into one call; matrices
with the same input are stacked. A layer of Llama is eight calls.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch.nn import functional

from ridgeline.core import ops
from ridgeline.core.errors import EngineError
from ridgeline.core.op_facts import Role
from ridgeline.core.spec import Activation, NormScope
from ridgeline.core.weight_uses import weight_uses
from ridgeline.executors.cuda.attention import ModelAttention
from ridgeline.executors.cuda.inputs import PassInput
from ridgeline.executors.cuda.kernels import AttendSpec, Experts, Gain, Kernels
from ridgeline.executors.cuda.kv_cache import DeviceKVCache
from ridgeline.executors.cuda.weights import DeviceWeights
from ridgeline.kernels import reference

Buffers = dict[str, torch.Tensor]
Call = Callable[[Buffers, PassInput], None]


class LowRank(NamedTuple):
    """One weight's adapter, on the device: ``down`` [r, in] and ``up`` [out, r]."""

    down: torch.Tensor
    up: torch.Tensor


DeviceAdapter = Mapping[str, LowRank]  # by canonical name of the adapted weight


class CallLowering:
    """What the calls of a model are made of.

    With ``adapters`` nothing is joined with a product that an adapter may change. ``attends`` has
    one attention of each kind: heads, their width, a layer, and how.
    """

    def __init__(
        self,
        weights: DeviceWeights,
        kernels: Kernels,
        cache: DeviceKVCache,
        attention: ModelAttention,
        adapters: Sequence[DeviceAdapter],
    ) -> None:
        self._weights, self._kernels, self._cache = weights, kernels, cache
        self._attention, self._adapters = attention, adapters
        self.attends: dict[Hashable, tuple[int, int, int, AttendSpec]] = {}

    def calls(self, body: Sequence[ops.Op]) -> Iterator[tuple[Call, tuple[int, ...]]]:
        """Each call, and the places of the ops that it stands for."""
        index = 0
        while index < len(body):
            op, follows = body[index], body[index + 1 :]
            taken = 1
            match op:
                case ops.QKVProject() | ops.MLP() | ops.OutProject() | ops.Down():
                    call, taken = self._product(op, follows)
                case ops.HeadNorm() | ops.Rope() | ops.KVWrite():
                    call, taken = self._rotate_and_write(body[index:])
                case _:
                    call = self._single(op)
            yield call, tuple(range(index, index + taken))
            index += taken

    def _product(self, op: ops.Op, follows: Sequence[ops.Op]) -> tuple[Call, int]:
        """A call for the op, and how many ops it stands for."""
        residual = None
        if not self._adapters and follows and isinstance(follows[0], ops.AddResidual):
            residual = follows[0].scale
        match op:
            case ops.QKVProject():
                return self._qkv(op), 1
            case ops.MLP():
                return self._mlp(op, residual), 1 if residual is None else 2
            case ops.OutProject() | ops.Down():
                return self._out(op, residual), 1 if residual is None else 2
        raise AssertionError(op)

    def _qkv(self, op: ops.QKVProject) -> Call:
        parts = (
            (op.query, "q", op.num_heads),
            (op.key, "k", op.num_kv_heads),
            (op.value, "v", op.num_kv_heads),
        )
        product = self._linear([weight for weight, _, _ in parts if weight], op.query_bias)
        widths = [heads * op.head_dim if weight else 0 for weight, _, heads in parts]

        def call(b: Buffers, at: PassInput) -> None:
            out = product(b[op.src], at)
            if op.clip is not None:
                out = out.clamp(-op.clip, op.clip)
            rows = torch.split(out, widths, dim=-1)
            for (_, name, _), part in zip(parts, rows, strict=True):
                b[name] = part.view(len(part), -1, op.head_dim)
            if op.value is None and op.key is not None:
                b["v"] = b["k"].clone()

        return call

    def _out(self, op: ops.OutProject | ops.Down, residual: float | None) -> Call:
        product = self._linear([op.weight], op.bias)
        if not isinstance(op, ops.Down):
            return lambda b, at: self._branch(b, product, b["h"], at, residual)
        return lambda b, at: self._branch(b, product, b["inner"], at, residual, dst=op.dst)

    def _mlp(self, op: ops.MLP, residual: float | None) -> Call:
        inner = self._inner(op)
        down = self._linear([op.down], op.down_bias)
        return lambda b, at: self._branch(b, down, inner(b, at), at, residual)

    def _inner(self, op: ops.MLP | ops.GateUp) -> Callable[[Buffers, PassInput], torch.Tensor]:
        up = [op.up] if op.gate is None else [op.gate, op.up]
        first = self._linear(up, op.up_bias if op.gate is None else op.gate_bias)
        joined = op.gate is not None and not self._adapters

        def inner(b: Buffers, at: PassInput) -> torch.Tensor:
            if joined:
                return first(b[op.src], at, activation=op.activation)
            out = first(b[op.src], at)
            gate, values = (None, out) if op.gate is None else out.chunk(2, dim=-1)
            if op.activation is Activation.IDENTITY:
                return values
            return self._kernels.activate(values, op.activation, gate)

        return inner

    @staticmethod
    def _branch(
        b: Buffers,
        product: Callable[..., torch.Tensor],
        source: torch.Tensor,
        at: PassInput,
        residual: float | None,
        *,
        dst: str = "h",
    ) -> None:
        """The product that ends a branch: into ``dst``, or added to x."""
        if residual is None:
            b[dst] = product(source, at)
        else:
            b["x"] = product(source, at, residual_TO=b["x"], residual_scale=residual)

    def _rotate_and_write(self, body: Sequence[ops.Op]) -> tuple[Call, int]:
        """Norms of heads, rotation and the write, as far as they are there."""
        norm: ops.HeadNorm | None = None
        rope: ops.Rope | None = None
        turned_first = False
        for taken, op in enumerate(body, start=1):
            match op:
                case ops.HeadNorm():
                    norm, turned_first = op, rope is not None
                case ops.Rope():
                    rope = op
                case ops.KVWrite():
                    return self._write(op, norm, rope, turned_first=turned_first), taken
                case _:
                    break
        raise AssertionError("heads are normed and rotated, and then kept")

    def _write(
        self,
        op: ops.KVWrite,
        norm: ops.HeadNorm | None,
        rope: ops.Rope | None,
        *,
        turned_first: bool,
    ) -> Call:
        """``turned_first``: rotation comes before the norms; kernels do it behind them."""
        gains = None
        if norm is not None:
            spec = norm.spec
            gains = tuple(
                Gain(spec=spec, weight=self._tensor(ref), bias=self._tensor(bias))
                for ref, bias in ((norm.query, norm.query_bias), (norm.key, norm.key_bias))
            )
        whole = norm is not None and norm.scope is NormScope.PROJECTION
        assert norm is None or not (turned_first and norm.scope is NormScope.EACH_HEAD)
        apart = whole or turned_first or (norm is not None and norm.query_bias is not None)
        starts = (0, 0) if rope is None else (rope.query_start, rope.key_start)

        def call(b: Buffers, at: PassInput) -> None:
            norms, turns = gains, None if rope is None else at.rope[rope.spec]
            if norm is not None and norm.values:
                b["v"] = reference.normalise(b["v"], None, norm.spec)
            if turned_first and turns is not None:
                b["q"], b["k"] = turns.rotate(b["q"]), turns.rotate(b["k"])
                turns = None
            if apart and gains is not None:
                for name, gain in zip("qk", gains, strict=True):
                    rows = b[name].flatten(1) if whole else b[name].flatten(0, 1)
                    b[name] = self._kernels.normalise(rows, gain).view(b[name].shape)
                norms = None
            b["q"] = self._kernels.rotate_and_write(
                b["q"],
                b["k"],
                b["v"] if op.has_values else None,
                self._cache.layer(op.layer),
                at.slots[op.group],
                rope=turns,
                starts=starts,
                norms=norms,  # type: ignore[arg-type]
            )

        return call

    def _single(self, op: ops.Op) -> Call:
        """An op that stands for itself."""
        tensors = self._weights.tensors
        match op:
            case ops.Embed():
                return self._embed(op)
            case ops.Norm():
                return self._norm(op)
            case ops.GateUp():
                inner = self._inner(op)
                return lambda b, at: b.update(inner=inner(b, at))
            case ops.SparseGateUp():
                return self._sparse_gate_up(op)
            case ops.Xielu():
                four = [tensors[weight.name] for weight in (op.rise, op.fall, op.beta, op.eps)]
                return lambda b, _: b.update(inner=reference.xielu(b["inner"], *four))
            case ops.LayerEmbed():
                return self._layer_embed(op)
            case ops.LayerInput():
                return self._layer_input(op)
            case ops.ScaleHidden():
                scale = tensors[op.weight.name]
                return lambda b, _: b.update(x=b["x"] * scale)
            case ops.GrowQueries():
                return lambda b, at: b.update(
                    q=reference.grow_queries(b["q"], op.growth, at.positions_T)
                )
            case ops.Attend():
                return self._attend(op)
            case ops.LatentProject():
                return self._latent_project(op)
            case ops.LatentAttend():
                return self._latent_attend(op)
            case ops.MoE():
                return self._moe(op)
            case ops.SharedExpert():
                return self._shared(op)
            case ops.AddShared():
                return lambda b, _: b.update(h=b["h"] + b["shared"])
            case ops.AddResidual():
                return lambda b, _: b.update(
                    x=b["x"] + (b["h"] if op.scale == 1.0 else b["h"] * op.scale)
                )
            case ops.AddLaurel():
                return lambda b, _: b.update(x=(b["x"] + b["h"] + b["n"] + b["shared"]) * 2**-0.5)
        assert isinstance(op, ops.StreamOp), "it is lowered with others"
        return self._stream(op)

    def _norm(self, op: ops.Norm) -> Call:
        gain = Gain(spec=op.spec, weight=self._tensor(op.weight), bias=self._tensor(op.bias))

        def call(b: Buffers, _: PassInput) -> None:
            rows = self._kernels.normalise(b[op.src], gain)
            b[op.dst] = rows if op.scale == 1.0 else rows * op.scale

        return call

    def _sparse_gate_up(self, op: ops.SparseGateUp) -> Call:
        gate, up = self._linear([op.gate], None), self._linear([op.up], None)

        def call(b: Buffers, at: PassInput) -> None:
            gates = reference.above_cutoff(gate(b[op.src], at), op.cutoff)
            b["inner"] = reference.gated(gates, up(b[op.src], at), op.activation)

        return call

    def _layer_input(self, op: ops.LayerInput) -> Call:
        gate, up = self._linear([op.gate], None), self._linear([op.up], None)

        def call(b: Buffers, at: PassInput) -> None:
            own = b["layers"][:, op.first : op.first + op.width]
            b["h"] = up(reference.gated(gate(b["x"], at), own, op.activation), at)

        return call

    def _attend(self, op: ops.Attend) -> Call:
        if op.chunked:
            raise EngineError("The cuda executor has no kernel for attention in chunks.")
        spec = AttendSpec(
            group=op.group,
            scale=op.scale,
            window=op.window,
            softcap=op.softcap,
            sinks_H=self._tensor(op.sinks),
        )
        attended = self._attention.op(op, spec)
        self._note(op.num_heads, op.head_dim, op.layer, spec)

        def call(b: Buffers, at: PassInput) -> None:
            b["h"] = attended(b["q"], self._cache.layer(op.layer), at).flatten(1)

        return call

    def _stream(self, op: ops.StreamOp) -> Call:
        tensors = self._weights.tensors
        products = {
            use.weight.name: self._linear([use.weight], None)
            for use in weight_uses(op)
            if use.role is Role.PRODUCT
        }

        def call(b: Buffers, at: PassInput) -> None:
            def product(x_TI: torch.Tensor, weight: ops.Weight) -> torch.Tensor:
                if weight.name in products:
                    return products[weight.name](x_TI, at)
                return functional.linear(x_TI, tensors[weight.name])

            reference.run_stream_op(op, b, product, lambda weight: tensors[weight.name])

        return call

    def _embed(self, op: ops.Embed) -> Call:
        table, positions = self._tensor(op.weight), self._tensor(op.positions)
        assert table is not None
        scale = torch.tensor(op.scale, dtype=table.dtype, device=table.device)

        def call(b: Buffers, at: PassInput) -> None:
            rows = functional.embedding(at.token_ids_T, table)
            b["x"] = rows if op.scale == 1.0 else rows * scale
            if positions is not None:
                b["x"] = b["x"] + functional.embedding(at.positions_T, positions)

        return call

    def _layer_embed(self, op: ops.LayerEmbed) -> Call:
        table, gain = self._tensor(op.table), self._tensor(op.gain)
        assert table is not None
        assert gain is not None
        product = self._linear([op.projection], None)

        def call(b: Buffers, at: PassInput) -> None:
            b["layers"] = reference.mix_layer_inputs(
                product(b["x"], at),
                reference.known_rows(at.token_ids_T, table),
                gain,
                op.norm,
                hidden_size=b["x"].shape[1],
            )

        return call

    def _latent_project(self, op: ops.LatentProject) -> Call:
        kernels = self._kernels
        query = self._linear([op.query], None)
        latent = self._linear([op.latent], op.latent_bias)
        to_query = None
        if op.query_latent is not None:
            to_query = self._linear([op.query_latent], op.query_latent_bias)
        query_gain = Gain(spec=op.norm, weight=self._tensor(op.query_norm))
        latent_gain = Gain(spec=op.norm, weight=self._tensor(op.latent_norm))
        (width,) = op.latent_norm.shape

        def call(b: Buffers, at: PassInput) -> None:
            source = b[op.src]
            inner = source
            if to_query is not None:
                inner = kernels.normalise(to_query(source, at), query_gain)
            b["q"] = query(inner, at).view(len(source), op.num_heads, -1)
            whole = latent(source, at)
            normed = kernels.normalise(whole[:, :width].contiguous(), latent_gain)
            b["k"] = torch.cat([normed, whole[:, width:]], dim=-1)[:, None]

        return call

    def _latent_attend(self, op: ops.LatentAttend) -> Call:
        """In the space of latents (DeepSeek-V2, §2.1.2): one KV head serves all heads."""
        spec = AttendSpec(group=op.group, scale=op.scale)
        self._note(op.num_heads, op.latent_dim + op.rope_dim, op.layer, spec)
        expand = self._tensor(op.expand)
        assert expand is not None
        heads_HER = expand.view(op.num_heads, -1, op.latent_dim)
        up_HnR = heads_HER[:, : op.nope_dim].contiguous()
        out_HRv = heads_HER[:, op.nope_dim :].mT.contiguous()

        def call(b: Buffers, at: PassInput) -> None:
            q_THd = b["q"]
            absorbed = torch.bmm(q_THd[..., : op.nope_dim].transpose(0, 1), up_HnR).transpose(0, 1)
            q_THW = torch.cat([absorbed, q_THd[..., op.nope_dim :]], dim=-1)
            mixed_THR = self._kernels.attend(q_THW, self._cache.layer(op.layer), at, spec)
            out = torch.bmm(mixed_THR.transpose(0, 1), out_HRv)
            b["h"] = out.transpose(0, 1).flatten(1)

        return call

    def _moe(self, op: ops.MoE) -> Call:
        if op.gate is None or op.expert_scale is not None or op.routing.scales_inputs:
            raise EngineError(
                "The cuda executor has no kernel for experts with scales, of outputs or inputs, or "
                "without gates."
            )
        matrices, tensor = self._weights.matrices, self._tensor
        router, bias = tensor(op.router), tensor(op.router_bias)
        assert router is not None
        router, bias = reference.wide(router), None if bias is None else reference.wide(bias)
        experts = Experts(
            routing=op.routing,
            correction_E=tensor(op.correction_bias),
            gate_up=matrices[op.gate.name],
            down=matrices[op.down.name],
            gate_up_bias=tensor(op.gate_bias),
            down_bias=tensor(op.down_bias),
            activation=op.activation,
        )

        def call(b: Buffers, _: PassInput) -> None:
            x_TD = b[op.src]
            logits_TE = functional.linear(reference.wide(b[op.router_src or op.src]), router, bias)
            b["h"] = self._kernels.experts(x_TD, logits_TE, experts)

        return call

    def _shared(self, op: ops.SharedExpert) -> Call:
        assert op.gate is not None, "as the experts beside it"
        first, down = self._linear([op.gate, op.up], None), self._linear([op.down], None)
        output_gate = self._tensor(op.output_gate)

        def call(b: Buffers, at: PassInput) -> None:
            x_TD = b[op.src]
            out = down(first(x_TD, at, activation=op.activation), at)
            if output_gate is not None:
                out = out * torch.sigmoid(functional.linear(x_TD, output_gate))
            b["shared"] = out

        return call

    def _note(self, num_heads: int, width: int, layer: int, spec: AttendSpec) -> None:
        """Keep one attention of each kind."""
        has_sinks = spec.sinks_H is not None
        kind = num_heads, width, spec.group, spec.window, spec.softcap, has_sinks
        self.attends.setdefault(kind, (num_heads, width, layer, spec))

    def _linear(
        self, parts: Sequence[ops.Weight], bias: ops.Weight | None
    ) -> Callable[..., torch.Tensor]:
        """The product with a stack of matrices, plus each sequence's adapter."""
        matrix, bias_O = self._weights.matrices[parts[0].name], self._tensor(bias)
        ends = (0, *accumulate(weight.shape[0] for weight in parts))
        columns = {
            part.name: slice(*ends) for part, ends in zip(parts, pairwise(ends), strict=True)
        }

        def call(x_TI: torch.Tensor, at: PassInput, **fused: object) -> torch.Tensor:
            out = self._kernels.linear(x_TI, matrix, bias_O=bias_O, **fused)  # type: ignore[arg-type]
            if self._adapters:
                self._adapt(out, x_TI, columns, at)
            return out

        return call

    def _adapt(
        self, out: torch.Tensor, x_TI: torch.Tensor, columns: dict[str, slice], at: PassInput
    ) -> None:
        assert at.spans is not None
        for span in at.spans:
            adapter = self._adapters[span.adapter - 1] if span.adapter else {}
            rows = slice(span.first, span.last)
            for name, part in columns.items():
                if name in adapter:
                    low_rank = functional.linear(x_TI[rows], adapter[name].down)
                    out[rows, part] += functional.linear(low_rank, adapter[name].up)

    def _tensor(self, weight: ops.Weight | None) -> torch.Tensor | None:
        return None if weight is None else self._weights.tensors[weight.name]
