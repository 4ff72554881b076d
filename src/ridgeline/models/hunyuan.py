"""Hunyuan (Tencent 2025): norms on the heads of q and k behind their rotation; dense and sparse."""

from dataclasses import replace

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.rope_spec import RopeSpec
from ridgeline.core.spec import (
    AttentionSpec,
    ModelSpec,
    MoESpec,
    RoutingSpec,
    Scoring,
    SharedExpertSpec,
)
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import Sizes, read_activation, read_heads, read_rms_norm, read_sizes
from ridgeline.models.moe_config import EXPERT_KEYS, QWEN_MOE_TENSORS, ignore_training
from ridgeline.models.rope_config import plain_rope, read_rope, rope_section
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, layer_tensors

_INERT = ("eod_token_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id",
          "text_end_id", "image_token_id", "mask_init_id", "org_vocab_size")  # fmt: skip


def _rope(config: ConfigReader, head_dim: int, max_position: int) -> RopeSpec:
    """With ``alpha`` the base is θ · alpha^(d/(d−2)), for texts of any length (NTK-aware)."""
    section = rope_section(config)
    if "alpha" not in section:
        return read_rope(config, head_dim=head_dim, max_position=max_position)
    kind = section.text("rope_type", default=section.text("type", default="dynamic"))
    if kind != "dynamic" or head_dim <= 2:
        raise UnsupportedModelError(
            "config.json gives alpha to a rope_type that is not dynamic, or to heads of 2."
        )
    for name in ("type", "factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        section.ignore(name)
    section.refuse("partial_rotary_factor", unless=(1, 1.0))
    theta = config.number("rope_theta", minimum=2.0, maximum=1e9, default=10_000.0)
    theta = section.number("rope_theta", minimum=2.0, maximum=1e9, default=theta)
    alpha = section.number("alpha", minimum=1e-3, maximum=1e9)
    theta *= alpha ** (head_dim / (head_dim - 2))
    return plain_rope(head_dim=head_dim, theta=theta)


def _attention(config: ConfigReader, sizes: Sizes) -> AttentionSpec:
    config.refuse("use_cla", unless=(False,))  # layers that share K and V
    config.refuse("use_qk_norm", unless=(True,))
    for name in _INERT:
        config.ignore(name)
    heads = read_heads(config, sizes.hidden_size)
    bias = config.boolean("attention_bias", default=False)
    return replace(
        heads.attention(_rope(config, heads.head_dim, sizes.max_position)),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=read_rms_norm(config, eps=1e-5),
        norm_after_rope=True,
    )


def build(config: ConfigReader) -> ModelSpec:
    """All layers are alike; some configs speak of one expert, which is no mixture."""
    config.refuse("num_experts", unless=(0, 1))
    sizes = read_sizes(config, max_position=2048)
    return pre_norm_decoder(
        config,
        model_type="hunyuan_v1_dense",
        sizes=sizes,
        attention=[_attention(config, sizes)] * sizes.num_layers,
        norm=read_rms_norm(config, eps=1e-5),
    )


def _one_for_all(config: ConfigReader, name: str, *, maximum: int) -> int:
    """A number that may be listed for each layer, if all are equal."""
    listed = config.integers(name) if config.is_list(name) else None
    if listed is None:
        return config.integer(name, maximum=maximum, default=1)
    if len(set(listed)) != 1 or listed[0] > maximum:
        raise UnsupportedModelError(
            f"config.json gives {name} for each layer; supported is one number of up to {maximum}."
        )
    return listed[0]


def build_moe(config: ConfigReader) -> ModelSpec:
    """Experts in every layer, and one more that every token goes through."""
    ignore_training(config)
    for name in ("num_shared_expert", "moe_intermediate_size", "moe_layer_num_skipped",
                 "use_mixed_mlp_moe", "moe_drop_tokens", "moe_random_routing_dropped_token",
                 "capacity_factor", "group_limited_greedy", "norm_topk_prob"):  # fmt: skip
        config.ignore(name)  # transformers reads none of these
    sizes = read_sizes(config, max_position=2048)
    num_experts = _one_for_all(config, "num_experts", maximum=2**14)
    moe = MoESpec(
        num_experts=num_experts,
        width=sizes.mlp_width,
        activation=read_activation(config, "hidden_act", default="silu"),
        routing=RoutingSpec(
            top_k=_one_for_all(config, "moe_topk", maximum=num_experts),
            scoring=Scoring.SOFTMAX,
            normalised=True,
        ),
        shared=SharedExpertSpec(width=sizes.mlp_width),
    )
    return pre_norm_decoder(
        config,
        model_type="hunyuan_v1_moe",
        sizes=sizes,
        attention=[_attention(config, sizes)] * sizes.num_layers,
        mlps=[moe] * sizes.num_layers,
        norm=read_rms_norm(config, eps=1e-5),
    )


_TENSORS = LLAMA_TENSORS | layer_tensors(
    {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
)
FAMILY = Family(
    model_type="hunyuan_v1_dense",
    build=build,
    tensors=_TENSORS,
    ignored=LLAMA_IGNORED,
    computes=frozenset({"num_experts"}),
)
FAMILY_MOE = Family(
    model_type="hunyuan_v1_moe",
    build=build_moe,
    tensors=_TENSORS
    | QWEN_MOE_TENSORS
    | layer_tensors(
        {
            "router": "mlp.gate.wg",
            "shared.gate": "mlp.shared_mlp.gate_proj",
            "shared.up": "mlp.shared_mlp.up_proj",
            "shared.down": "mlp.shared_mlp.down_proj",
        }
    ),
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS,
)
