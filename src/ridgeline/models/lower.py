"""From a spec to the ordered list of ops that executors run and the roofline prices.

Canonical weight names: ``embed``, ``final_norm``, ``head``, and for layer i ``layers.{i}.`` with
``attention_norm``, ``q``, ``k``, ``v``, ``o``, ``q_norm``, ``k_norm``, ``attention_post_norm``,
``mlp_norm``, ``gate``, ``up``, ``down``, ``mlp_post_norm``, and ``q_bias`` and so on for biases.
A tied head reads ``embed``.
"""

from ridgeline.core.ops import (
    MLP,
    AddResidual,
    Attend,
    Embed,
    Head,
    HeadNorm,
    KVWrite,
    Norm,
    Op,
    OutProject,
    QKVProject,
    Rope,
    Weight,
)
from ridgeline.core.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, kv_groups


def lower(spec: ModelSpec) -> tuple[Op, ...]:
    """The ops of a model, in order; ``group`` of an op indexes ``kv_groups(spec)``."""
    embed = Weight(name="embed", shape=(spec.vocab_size, spec.hidden_size))
    head = embed if spec.tie_embeddings else Weight(name="head", shape=embed.shape)
    group_of = {
        layer: index for index, group in enumerate(kv_groups(spec)) for layer in group.layers
    }
    ops: list[Op] = [Embed(weight=embed, scale=spec.embedding_scale)]
    for index, layer in enumerate(spec.layers):
        ops += _Layer(index, group_of[index], spec.hidden_size).ops(layer)
    ops.append(_norm("x", "final_norm", spec.hidden_size, spec.final_norm))
    ops.append(Head(weight=head, softcap=spec.logit_softcap))
    return tuple(ops)


def _norm(src: str, weight: str, width: int, spec: NormSpec) -> Norm:
    return Norm(src=src, dst="h", weight=Weight(name=weight, shape=(width,)), spec=spec)


class _Layer:
    """Lowers one layer; its methods name the layer's weights."""

    def __init__(self, index: int, group: int, hidden_size: int) -> None:
        self.index, self.group, self.hidden_size = index, group, hidden_size

    def ops(self, layer: LayerSpec) -> list[Op]:
        ops: list[Op] = [self.norm("x", "attention_norm", layer.attention_norm)]
        ops += self.attention(layer.attention)
        if layer.attention_post_norm is not None:
            ops.append(self.norm("h", "attention_post_norm", layer.attention_post_norm))
        ops += [AddResidual(), self.norm("x", "mlp_norm", layer.mlp_norm), self.mlp(layer.mlp)]
        if layer.mlp_post_norm is not None:
            ops.append(self.norm("h", "mlp_post_norm", layer.mlp_post_norm))
        return [*ops, AddResidual()]

    def attention(self, spec: AttentionSpec) -> list[Op]:
        q_width = spec.num_heads * spec.head_dim
        kv_width = spec.num_kv_heads * spec.head_dim
        ops: list[Op] = [
            QKVProject(
                query=self.weight("q", q_width, self.hidden_size),
                key=self.weight("k", kv_width, self.hidden_size),
                value=self.weight("v", kv_width, self.hidden_size),
                query_bias=self.weight("q_bias", q_width) if spec.qkv_bias else None,
                key_bias=self.weight("k_bias", kv_width) if spec.qkv_bias else None,
                value_bias=self.weight("v_bias", kv_width) if spec.qkv_bias else None,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
            )
        ]
        if spec.qk_norm is not None:
            query, key = self.weight("q_norm", spec.head_dim), self.weight("k_norm", spec.head_dim)
            ops.append(HeadNorm(query=query, key=key, spec=spec.qk_norm))
        if spec.rope is not None:
            ops.append(Rope(spec=spec.rope))
        attend = Attend(
            layer=self.index,
            group=self.group,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
        out = OutProject(
            weight=self.weight("o", self.hidden_size, q_width),
            bias=self.weight("o_bias", self.hidden_size) if spec.out_bias else None,
        )
        return [*ops, KVWrite(layer=self.index, group=self.group), attend, out]

    def mlp(self, spec: MLPSpec) -> MLP:
        biased, gated = spec.bias, spec.gated
        return MLP(
            gate=self.weight("gate", spec.width, self.hidden_size) if gated else None,
            up=self.weight("up", spec.width, self.hidden_size),
            down=self.weight("down", self.hidden_size, spec.width),
            gate_bias=self.weight("gate_bias", spec.width) if biased and gated else None,
            up_bias=self.weight("up_bias", spec.width) if biased else None,
            down_bias=self.weight("down_bias", self.hidden_size) if biased else None,
            activation=spec.activation,
        )

    def norm(self, src: str, name: str, spec: NormSpec) -> Norm:
        return _norm(src, f"layers.{self.index}.{name}", self.hidden_size, spec)

    def weight(self, name: str, *shape: int) -> Weight:
        return Weight(name=f"layers.{self.index}.{name}", shape=shape)
