"""MiniMax-M2 (2025): experts by corrected sigmoid scores, norms on all of q and all of k."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec, MoESpec, NormScope, RoutingSpec, Scoring
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import read_activation, read_heads, read_rms_norm, read_sizes
from ridgeline.models.mixtral import TENSORS as MIXTRAL_TENSORS
from ridgeline.models.moe_config import (
    EXPERT_KEYS,
    ignore_training,
    read_num_experts,
    read_top_k,
)
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS

# What configs say besides, with the values that all published models have.
_FIXED: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
}
_TRAINING = (
    "attn_type_list", "layernorm_full_attention_beta", "layernorm_linear_attention_beta",
    "layernorm_mlp_beta", "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules",
    "use_mtp",
)  # fmt: skip


def build(config: ConfigReader) -> ModelSpec:
    """``rotary_dim`` elements of each head are rotated."""
    for name, values in _FIXED.items():
        config.refuse(name, unless=values)
    for name in _TRAINING:
        config.ignore(name)
    ignore_training(config)
    sizes = read_sizes(config, max_position=196_608, vocab_size=200_064)
    heads = read_heads(config, sizes.hidden_size, head_dim=128)
    rotated = config.integer("rotary_dim", maximum=heads.head_dim, default=heads.head_dim)
    attention = replace(
        heads.attention(
            read_rope(
                config,
                head_dim=heads.head_dim,
                max_position=sizes.max_position,
                theta=5_000_000.0,
                partial=rotated / heads.head_dim,
            )
        ),
        qk_norm=read_rms_norm(config),
        qk_norm_scope=NormScope.PROJECTION,
    )
    num_experts = read_num_experts(config, "num_local_experts", "num_experts")
    moe = MoESpec(
        num_experts=num_experts,
        width=sizes.mlp_width,
        activation=read_activation(config, "hidden_act", default="silu"),
        routing=RoutingSpec(
            top_k=read_top_k(config, num_experts, default=8),
            scoring=Scoring.SIGMOID,
            normalised=True,
            correction_bias=True,
        ),
    )
    return pre_norm_decoder(
        config,
        model_type="minimax_m2",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlps=[moe] * sizes.num_layers,
    )


_CORRECTION = "model.layers.{i}.block_sparse_moe.e_score_correction_bias"
FAMILY = Family(
    model_type="minimax_m2",
    build=build,
    tensors=LLAMA_TENSORS
    | MIXTRAL_TENSORS
    | {"layers.{i}.correction_bias": TensorSource(name=_CORRECTION)},
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS | {"partial_rotary_factor"},
)
