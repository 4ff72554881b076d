"""One layer of a spec as ops (`lower`, which names the weights)."""

from dataclasses import replace
from typing import Any

from ridgeline.core.ops import (
    MLP,
    AddLaurel,
    AddResidual,
    AddShared,
    AddToStreams,
    Attend,
    BidirectionalAttend,
    CorrectStreams,
    Down,
    GateHeads,
    GateUp,
    GrowQueries,
    HeadNorm,
    KVWrite,
    LayerInput,
    Norm,
    Op,
    OutProject,
    PredictStreams,
    QKVProject,
    Rope,
    ScaleHidden,
    SparseGateUp,
    Weight,
    Xielu,
)
from ridgeline.core.rope_spec import LongRopeScaling
from ridgeline.core.spec import (
    Activation,
    AttentionSpec,
    GatedDeltaSpec,
    LayerInputSpec,
    LayerSpec,
    Mamba2Spec,
    MLASpec,
    MLPSpec,
    MoESpec,
    NormScope,
    NormSpec,
    ShortConvSpec,
    StateSpec,
    StreamsSpec,
)
from ridgeline.models.lower_latent import latent_attention_ops
from ridgeline.models.lower_moe import dense_ops, moe_ops
from ridgeline.models.lower_states import gated_delta_ops, mamba2_ops, short_conv_ops


def norm_op(src: str, dst: str, name: str, width: int, spec: NormSpec) -> Norm:
    """A norm of rows ``width`` wide; its weights are called ``name`` and ``name_bias``."""
    assert spec.gain or not spec.unit_offset
    return Norm(
        src=src,
        dst=dst,
        weight=Weight(name=name, shape=(width,)) if spec.gain else None,
        bias=Weight(name=f"{name}_bias", shape=(width,)) if spec.bias else None,
        spec=spec,
    )


def _is_gated(layer: LayerSpec) -> bool:
    return isinstance(layer.attention, AttentionSpec) and layer.attention.output_gate


def _check_scales(layer: LayerSpec) -> None:
    """Assert that what is scaled is there."""
    assert layer.attention or layer.attention_scale == 1.0
    assert layer.scan or layer.scan_scale == 1.0
    assert layer.mlp or layer.mlp_scale == 1.0
    assert layer.attention_norm or layer.attention_norm_scale == 1.0
    assert layer.mlp_norm or layer.mlp_norm_scale == 1.0
    assert not layer.laurel_rank or layer.attention_scale == 1.0


def _check_norms_apart(layer: LayerSpec) -> None:
    """Assert that nothing else is kept in ``n`` while attention runs."""
    assert not layer.scan
    assert not layer.laurel_rank
    assert not layer.experts_beside
    assert not _is_gated(layer)


def _own_kv_heads(spec: AttentionSpec) -> int:
    """KV heads that the layer computes."""
    return spec.num_kv_heads if spec.kv_layer is None else 0


class LayerLowering:
    """Lowers one layer; its methods name the layer's weights.

    ``group`` is that of its KV, ``offset`` the layer's place in a sequence's state.
    """

    def __init__(self, index: int, group: int | None, hidden_size: int, offset: int) -> None:
        self.index, self.group, self.hidden_size, self.offset = index, group, hidden_size, offset

    def ops(
        self,
        layer: LayerSpec,
        inputs: LayerInputSpec | None,
        streams: StreamsSpec | None = None,
    ) -> list[Op]:
        _check_scales(layer)
        if layer.parallel:
            assert layer.attention_norm is not None, "parallel branches are normed"
            assert layer.attention
            assert layer.mlp
        ops = list[Op]()
        if streams is not None:
            ops.append(self.predict_streams(streams))
        src = "x"
        if layer.parallel and layer.mlp_norm is not None:
            _check_norms_apart(layer)
            ops.append(self.mlp_norm("n", layer, layer.mlp_norm))
        if layer.attention_norm is not None:
            # h does not outlive the first branch, nor attention, after which a gate reads it again.
            shares_norm = layer.parallel and layer.mlp_norm is None
            is_read_again = shares_norm or layer.scan or layer.laurel_rank or _is_gated(layer)
            src = "n" if is_read_again else "h"
            norm = self.norm("x", src, "attention_norm", layer.attention_norm)
            ops.append(replace(norm, scale=layer.attention_norm_scale))
        if layer.scan is not None:
            assert isinstance(layer.attention, AttentionSpec | MLASpec), "it would be attention's"
            assert layer.attention_norm is not None
            ops += [*self.mixer(layer.scan, src), AddResidual(scale=layer.scan_scale)]
        if layer.laurel_rank is not None:
            ops += self.laurel(layer, layer.laurel_rank)
        if layer.attention is not None:
            ops += self.mixer(layer.attention, src)
            if layer.attention_post_norm is not None:
                ops.append(self.norm("h", "h", "attention_post_norm", layer.attention_post_norm))
            is_alone = layer.laurel_rank is None
            ops.append(AddResidual(scale=layer.attention_scale) if is_alone else AddLaurel())
        if layer.attention_residual_norm is not None:
            spec = layer.attention_residual_norm
            ops.append(self.norm("x", "x", "attention_residual_norm", spec))
        if layer.mlp is not None:
            ops += self.feed_forward(layer, layer.mlp, "n" if layer.parallel else "x")
        if streams is not None:
            ops.append(self.correct_streams(streams))
        if inputs is not None:
            ops += self.layer_input(inputs)
            added = AddToStreams(num_streams=streams.num_streams) if streams else AddResidual()
            ops.append(added)
        if layer.scaled_output:
            ops.append(ScaleHidden(weight=self.weight("scale", 1)))
        return ops

    def layer_input(self, spec: LayerInputSpec) -> list[Op]:
        """What the layer's own embedding adds."""
        gate = self.weight("input_gate", spec.width, self.hidden_size)
        up = self.weight("input_up", self.hidden_size, spec.width)
        first = self.index * spec.width
        return [
            LayerInput(gate=gate, up=up, activation=spec.activation, first=first),
            self.norm("h", "h", "input_norm", spec.norm),
        ]

    def predict_streams(self, spec: StreamsSpec) -> Op:
        count = spec.num_streams
        return PredictStreams(
            router=self.weight("stream_router", count, self.hidden_size),
            gain=self.weight("stream_norm", self.hidden_size),
            norm=spec.norm,
            coefs=self.weight("predict", count**2, count),
        )

    def correct_streams(self, spec: StreamsSpec) -> Op:
        count = spec.num_streams
        return CorrectStreams(
            router=self.weight("stream_router", count, self.hidden_size),
            gain=self.weight("stream_norm", self.hidden_size),
            norm=spec.norm,
            coefs=self.weight("correct", count, count),
            scale=self.weight("correct_scale", self.hidden_size) if spec.scaled else None,
        )

    def laurel(self, layer: LayerSpec, rank: int) -> list[Op]:
        """The low-rank branch beside attention, from ``n`` to ``shared``."""
        assert layer.attention is not None
        assert layer.attention_norm is not None
        down = GateUp(
            gate=None,
            up=self.weight("laurel_down", rank, self.hidden_size),
            gate_bias=None,
            up_bias=None,
            activation=Activation.IDENTITY,
            src="n",
        )
        up = self.weight("laurel_up", self.hidden_size, rank)
        normed = self.norm("shared", "shared", "laurel_norm", layer.attention_norm)
        return [down, Down(weight=up, bias=None, dst="shared"), normed]

    def feed_forward(self, layer: LayerSpec, mlp: MLPSpec | MoESpec, src: str) -> list[Op]:
        """The second branch, with its norms."""
        ops = list[Op]()
        if layer.mlp_norm is not None and not layer.parallel:
            src = "h"
            ops.append(self.mlp_norm(src, layer, layer.mlp_norm))
        if layer.experts_beside is not None:
            assert isinstance(mlp, MLPSpec)
            ops += self.beside_experts(mlp, layer.experts_beside, layer.mlp_norm)
        elif isinstance(mlp, MoESpec):
            ops += moe_ops(mlp, src, hidden_size=self.hidden_size, weight=self.weight)
        else:
            ops += self.mlp(mlp, src)
        if layer.mlp_post_norm is not None:
            ops.append(self.norm("h", "h", "mlp_post_norm", layer.mlp_post_norm))
        ops.append(AddResidual(scale=layer.mlp_scale))
        if layer.mlp_residual_norm is not None:
            ops.append(self.norm("x", "x", "mlp_residual_norm", layer.mlp_residual_norm))
        return ops

    def mlp_norm(self, dst: str, layer: LayerSpec, spec: NormSpec) -> Norm:
        return replace(self.norm("x", dst, "mlp_norm", spec), scale=layer.mlp_norm_scale)

    def beside_experts(self, mlp: MLPSpec, experts: MoESpec, norm: NormSpec | None) -> list[Op]:
        """A network's normed output and that of experts, which are added."""
        assert norm is not None
        names: dict[str, Any] = {"hidden_size": self.hidden_size, "weight": self.weight}
        to_router = self.norm("x", "n", "router_norm", norm)
        return [
            *dense_ops(mlp, **names),
            self.norm("shared", "shared", "mlp_own_norm", norm),
            replace(to_router, scale=self.hidden_size**-0.5),
            self.norm("x", "h", "experts_norm", norm),
            *moe_ops(experts, "h", router_src="n", **names),
            self.norm("h", "h", "experts_own_norm", norm),
            AddShared(),
        ]

    def mixer(self, spec: AttentionSpec | MLASpec | StateSpec, src: str) -> list[Op]:
        """Attention, or what stands in its place."""
        match spec:
            case AttentionSpec():
                return self.attention(spec, src)
            case MLASpec():
                assert self.group is not None
                return latent_attention_ops(
                    spec,
                    src,
                    layer=self.index,
                    group=self.group,
                    hidden_size=self.hidden_size,
                    weight=self.weight,
                )
            case GatedDeltaSpec():
                return gated_delta_ops(spec, src, **self.state_place)
            case Mamba2Spec():
                return mamba2_ops(spec, src, **self.state_place)
            case ShortConvSpec():
                return short_conv_ops(spec, src, **self.state_place)

    @property
    def state_place(self) -> dict[str, Any]:
        """What lowering of what keeps states is told of the layer."""
        return {
            "layer": self.index,
            "offset": self.offset,
            "hidden_size": self.hidden_size,
            "weight": self.weight,
        }

    def attention(self, spec: AttentionSpec, src: str) -> list[Op]:
        ops: list[Op] = [self.qkv(spec, src), *self.norm_and_rope(spec)]
        q_width = spec.num_heads * spec.head_dim
        out = OutProject(
            weight=self.weight("o", self.hidden_size, q_width),
            bias=self.weight("o_bias", self.hidden_size) if spec.out_bias else None,
        )
        if spec.bidirectional:
            assert not spec.sinks
            assert not spec.output_gate
            assert spec.query_growth is None
            assert spec.out_norm is None
            assert not spec.chunked
            both_ways = BidirectionalAttend(
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
            )
            return [*ops, both_ways, out]
        ops += self.write_and_attend(spec)
        if spec.output_gate:
            bias = self.weight("gate_heads_bias", q_width) if spec.qkv_bias else None
            gate = self.weight("gate_heads", q_width, self.hidden_size)
            ops.append(GateHeads(weight=gate, bias=bias, src=src))
        if spec.out_norm is not None:
            ops.append(self.norm("h", "h", "out_norm", spec.out_norm, width=q_width))
        return [*ops, out]

    def qkv(self, spec: AttentionSpec, src: str) -> QKVProject:
        """The product of the queries alone, of a layer that reads another's K and V."""
        assert spec.num_kv_heads
        own_kv_heads = _own_kv_heads(spec)
        q_width, kv_width = spec.num_heads * spec.head_dim, own_kv_heads * spec.head_dim
        key, value = (self.weight(name, kv_width, self.hidden_size) for name in "kv")
        key_bias, value_bias = (self.weight(f"{name}_bias", kv_width) for name in "kv")
        has_bias = spec.qkv_bias and own_kv_heads > 0
        has_value = own_kv_heads > 0 and not spec.value_is_key
        assert own_kv_heads or not (spec.value_is_key or spec.value_norm), "they are another's"
        return QKVProject(
            query=self.weight("q", q_width, self.hidden_size),
            key=key if own_kv_heads else None,
            value=value if has_value else None,
            query_bias=self.weight("q_bias", q_width) if spec.qkv_bias else None,
            key_bias=key_bias if has_bias else None,
            value_bias=value_bias if has_bias and has_value else None,
            num_heads=spec.num_heads,
            num_kv_heads=own_kv_heads,
            head_dim=spec.head_dim,
            src=src,
            clip=spec.qkv_clip,
        )

    def write_and_attend(self, spec: AttentionSpec) -> list[Op]:
        """Attention to the KV cache, which a layer that reads another's K and V does not write."""
        assert self.group is not None
        assert spec.window or not spec.chunked
        ops: list[Op] = []
        if _own_kv_heads(spec):
            write = KVWrite(
                layer=self.index,
                group=self.group,
                num_kv_heads=spec.num_kv_heads,
                k_width=spec.head_dim,
                v_width=spec.head_dim,
            )
            ops.append(write)
        if spec.query_growth is not None:
            heads, width = spec.num_heads, spec.head_dim
            ops.append(GrowQueries(growth=spec.query_growth, num_heads=heads, head_dim=width))
        attend = Attend(
            layer=self.index if spec.kv_layer is None else spec.kv_layer,
            group=self.group,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=self.weight("sinks", spec.num_heads) if spec.sinks else None,
            chunked=spec.chunked,
        )
        return [*ops, attend]

    def norm_and_rope(self, spec: AttentionSpec) -> list[Op]:
        """What is done to q and k before they are used, as far as the layer has it."""
        ops: list[Op] = []
        if spec.qk_norm is not None:
            ops.append(self.head_norm(spec, spec.qk_norm))
        else:
            assert spec.qk_norm_scope is NormScope.HEAD, "there is no norm that it could change"
            assert not spec.value_norm, "it is that of q and k"
            assert not spec.norm_after_rope
        if spec.rope is not None:
            if isinstance(spec.rope.scaling, LongRopeScaling):
                assert len(spec.rope.scaling.factors) == spec.rope.rotary_dim // 2
            rope = Rope(
                spec=spec.rope,
                num_heads=spec.num_heads,
                num_kv_heads=_own_kv_heads(spec),
                head_dim=spec.head_dim,
                key_dim=spec.head_dim,
            )
            ops.append(rope)
        else:
            assert not spec.norm_after_rope
        return ops[::-1] if spec.norm_after_rope else ops

    def head_norm(self, spec: AttentionSpec, norm: NormSpec) -> HeadNorm:
        def gain(name: str, heads: int) -> Weight:
            match spec.qk_norm_scope:
                case NormScope.HEAD:
                    return self.weight(name, spec.head_dim)
                case NormScope.EACH_HEAD:
                    return self.weight(name, heads, spec.head_dim)
                case NormScope.PROJECTION:
                    return self.weight(name, heads * spec.head_dim)

        if not norm.gain:  # nor anything that would change nothing without one
            assert not norm.unit_offset
            assert not norm.bias
            assert not spec.norm_after_rope
            assert spec.qk_norm_scope is not NormScope.EACH_HEAD
        own_kv_heads = _own_kv_heads(spec)
        has_bias = norm.bias and own_kv_heads > 0
        return HeadNorm(
            query=gain("q_norm", spec.num_heads) if norm.gain else None,
            key=gain("k_norm", own_kv_heads) if own_kv_heads and norm.gain else None,
            spec=norm,
            num_heads=spec.num_heads,
            num_kv_heads=own_kv_heads,
            head_dim=spec.head_dim,
            scope=spec.qk_norm_scope,
            query_bias=gain("q_norm_bias", spec.num_heads) if norm.bias else None,
            key_bias=gain("k_norm_bias", own_kv_heads) if has_bias else None,
            values=spec.value_norm,
        )

    def mlp(self, spec: MLPSpec, src: str) -> list[Op]:
        biased, gated = spec.bias, spec.gated
        mlp = MLP(
            gate=self.weight("gate", spec.width, self.hidden_size) if gated else None,
            up=self.weight("up", spec.width, self.hidden_size),
            down=self.weight("down", self.hidden_size, spec.width),
            gate_bias=self.weight("gate_bias", spec.width) if biased and gated else None,
            up_bias=self.weight("up_bias", spec.width) if biased else None,
            down_bias=self.weight("down_bias", self.hidden_size) if biased else None,
            activation=spec.activation,
            src=src,
        )
        assert spec.activation is not Activation.IDENTITY or spec.xielu
        if spec.cutoff is not None:
            assert mlp.gate is not None
            assert not biased
            assert spec.inner_norm is None
            assert not spec.xielu
            sparse = SparseGateUp(
                gate=mlp.gate, up=mlp.up, activation=spec.activation, cutoff=spec.cutoff, src=src
            )
            return [sparse, Down(weight=mlp.down, bias=None)]
        if spec.inner_norm is None and not spec.xielu:
            return [mlp]
        inner = GateUp(
            gate=mlp.gate,
            up=mlp.up,
            gate_bias=mlp.gate_bias,
            up_bias=mlp.up_bias,
            activation=spec.activation,
            src=src,
        )
        ops: list[Op] = [inner]
        if spec.xielu:
            numbers = {name: self.weight(f"xielu.{name}", 1) for name in ("rise", "fall")}
            numbers |= {name: self.weight(f"xielu.{name}") for name in ("beta", "eps")}
            ops.append(Xielu(width=spec.width, **numbers))
        if spec.inner_norm is not None:
            ops.append(self.norm("inner", "inner", "inner_norm", spec.inner_norm, width=spec.width))
        return [*ops, Down(weight=mlp.down, bias=mlp.down_bias)]

    def norm(
        self, src: str, dst: str, name: str, spec: NormSpec, *, width: int | None = None
    ) -> Norm:
        return norm_op(src, dst, f"layers.{self.index}.{name}", width or self.hidden_size, spec)

    def weight(self, name: str, *shape: int) -> Weight:
        return Weight(name=f"layers.{self.index}.{name}", shape=shape)
