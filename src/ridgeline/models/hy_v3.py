"""Hy3 (Tencent, 2026): experts by corrected sigmoid scores beside a shared one, Qwen 3's heads."""

from dataclasses import replace

from ridgeline.core.spec import (
    MLPSpec,
    ModelSpec,
    MoESpec,
    RoutingSpec,
    Scoring,
    SharedExpertSpec,
)
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import read_activation, read_heads, read_rms_norm, read_sizes
from ridgeline.models.moe_config import (
    EXPERT_KEYS,
    QWEN_MOE_TENSORS,
    choose_mlps,
    ignore_training,
    num_dense_layers,
    read_num_experts,
    read_top_k,
    read_width,
)
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, layer_tensors


def build(config: ConfigReader) -> ModelSpec:
    """The first layers are dense, the others have experts."""
    config.ignore("enable_moe_fp32_combine")  # how a sum is rounded
    config.refuse("mlp_bias", unless=(False,))
    ignore_training(config)
    sizes = read_sizes(config, max_position=131_072, vocab_size=120_832)
    heads = read_heads(config, sizes.hidden_size, head_dim=128)
    norm = read_rms_norm(config, eps=1e-5)
    bias = config.boolean("attention_bias", default=False)
    rope = read_rope(
        config, head_dim=heads.head_dim, max_position=sizes.max_position, theta=11_158_840.0
    )
    attention = replace(heads.attention(rope), qkv_bias=bias, out_bias=bias, qk_norm=norm)
    activation = read_activation(config, "hidden_act", default="silu")
    num_experts = read_num_experts(config, "num_experts", "num_local_experts")
    width = read_width(config, "moe_intermediate_size")
    num_shared = config.integer("num_shared_experts", minimum=0, maximum=2**10, default=1)
    scale = config.number("router_scaling_factor", minimum=1e-6, maximum=1e6, default=2.826)
    moe = MoESpec(
        num_experts=num_experts,
        width=width,
        activation=activation,
        routing=RoutingSpec(
            top_k=read_top_k(config, num_experts, default=8),
            scoring=Scoring.SIGMOID,
            normalised=True,
            scale=scale,
            correction_bias=True,
        ),
        shared=SharedExpertSpec(width=width * num_shared) if num_shared else None,
    )
    num_dense = num_dense_layers(config, sizes.num_layers)
    return pre_norm_decoder(
        config,
        model_type="hy_v3",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlps=choose_mlps(
            [layer >= num_dense for layer in range(sizes.num_layers)],
            dense=MLPSpec(width=sizes.mlp_width, activation=activation),
            moe=moe,
        ),
        norm=norm,
    )


FAMILY = Family(
    model_type="hy_v3",
    build=build,
    tensors=LLAMA_TENSORS
    | QWEN_MOE_TENSORS
    | layer_tensors(
        {
            "router": "mlp.router.gate",
            "shared.gate": "mlp.shared_mlp.gate_proj",
            "shared.up": "mlp.shared_mlp.up_proj",
            "shared.down": "mlp.shared_mlp.down_proj",
        }
    )
    | {"layers.{i}.correction_bias": TensorSource(name="model.layers.{i}.mlp.expert_bias")},
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS,
)
