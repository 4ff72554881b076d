"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with experts in every layer."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec, MoESpec, RoutingSpec, Scoring
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_activation, read_heads, read_sizes
from ridgeline.models.moe_config import (
    EXPERT_KEYS,
    ignore_training,
    read_num_experts,
    read_top_k,
)
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, layer_tensors


def build(config: ConfigReader) -> ModelSpec:
    """The window, if any, is in all layers; the weights of a token's experts add up to one."""
    sizes = read_sizes(config, max_position=131_072)
    heads = read_heads(config, sizes.hidden_size)
    attention = replace(
        heads.attention(
            read_rope(
                config, head_dim=heads.head_dim, max_position=sizes.max_position, theta=1_000_000.0
            )
        ),
        window=config.optional_integer("sliding_window", default=None),
    )
    ignore_training(config)
    num_experts = read_num_experts(config, "num_local_experts", "num_experts")
    moe = MoESpec(
        num_experts=num_experts,
        width=sizes.mlp_width,
        activation=read_activation(config, "hidden_act", default="silu"),
        routing=RoutingSpec(
            top_k=read_top_k(config, num_experts, default=2),
            scoring=Scoring.SOFTMAX,
            normalised=True,
        ),
    )
    return pre_norm_decoder(
        config,
        model_type="mixtral",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlps=[moe] * sizes.num_layers,
    )


TENSORS = layer_tensors(
    {
        "router": "block_sparse_moe.gate",
        "experts.gate": "block_sparse_moe.experts.{e}.w1",
        "experts.up": "block_sparse_moe.experts.{e}.w3",
        "experts.down": "block_sparse_moe.experts.{e}.w2",
    }
)
FAMILY = Family(
    model_type="mixtral",
    build=build,
    tensors=LLAMA_TENSORS | TENSORS,
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS,
)
