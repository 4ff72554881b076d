"""OLMoE (arXiv 2409.02060): experts in every layer, norms on all of q and all of k."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec, MoESpec, NormScope, RoutingSpec, Scoring
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder, with_post_norms
from ridgeline.models.family import Family
from ridgeline.models.fields import read_activation, read_heads, read_rms_norm, read_sizes
from ridgeline.models.moe_config import (
    EXPERT_KEYS,
    QWEN_MOE_TENSORS,
    ignore_training,
    read_num_experts,
    read_top_k,
)
from ridgeline.models.olmo2 import OLMO_TENSORS
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """``clip_qkv``, which no published model sets, would bound q and k behind their norms."""
    sizes = read_sizes(config, max_position=4096)
    heads = read_heads(config, sizes.hidden_size)
    norm = read_rms_norm(config, eps=1e-5)
    bias = config.boolean("attention_bias", default=False)
    attention = replace(
        heads.attention(
            read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
        ),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
        qk_norm_scope=NormScope.PROJECTION,
    )
    ignore_training(config)
    num_experts = read_num_experts(config, "num_experts", "num_local_experts")
    moe = MoESpec(
        num_experts=num_experts,
        width=sizes.mlp_width,
        activation=read_activation(config, "hidden_act", default="silu"),
        routing=RoutingSpec(
            top_k=read_top_k(config, num_experts, default=8),
            scoring=Scoring.SOFTMAX,
            normalised=config.boolean("norm_topk_prob", default=False),
        ),
    )
    return pre_norm_decoder(
        config,
        model_type="olmoe",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlps=[moe] * sizes.num_layers,
        norm=norm,
    )


def build_flex(config: ConfigReader) -> ModelSpec:
    """FlexOlmo (arXiv 2507.07024): norms behind the branches, as in OLMo 2."""
    return with_post_norms(build(config), instead=True)


FAMILY = Family(
    model_type="olmoe",
    build=build,
    tensors=LLAMA_TENSORS | QWEN_MOE_TENSORS,
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS,
)
FLEX_OLMO = replace(
    FAMILY, model_type="flex_olmo", build=build_flex, tensors=OLMO_TENSORS | QWEN_MOE_TENSORS
)
