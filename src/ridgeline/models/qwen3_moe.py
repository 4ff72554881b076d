"""Qwen 3 with experts (arXiv 2505.09388): RMSNorm on the heads of q and k, no shared expert."""

from dataclasses import replace

from ridgeline.core.spec import MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_activation, read_heads, read_rms_norm, read_sizes
from ridgeline.models.moe_config import EXPERT_KEYS, QWEN_MOE_TENSORS, choose_mlps, sparse_layers
from ridgeline.models.qwen2_moe import read_qwen_moe
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """The window, if there is one, is in all layers."""
    sizes = read_sizes(config, max_position=32_768)
    heads = read_heads(config, sizes.hidden_size)
    uses_window = config.boolean("use_sliding_window", default=False)
    window = config.optional_integer("sliding_window", default=4096) if uses_window else None
    for name in ("sliding_window", "max_window_layers"):  # the second counts in Qwen 3 alone
        config.ignore(name)
    bias = config.boolean("attention_bias", default=False)
    attention = replace(
        heads.attention(
            read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
        ),
        window=window,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=read_rms_norm(config),
    )
    activation = read_activation(config, "hidden_act", default="silu")
    mlps = choose_mlps(
        sparse_layers(config, sizes.num_layers),
        dense=MLPSpec(width=sizes.mlp_width, activation=activation),
        moe=read_qwen_moe(config, activation, shared=None),
    )
    return pre_norm_decoder(
        config,
        model_type="qwen3_moe",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlps=mlps,
    )


FAMILY = Family(
    model_type="qwen3_moe",
    build=build,
    tensors=LLAMA_TENSORS | QWEN_MOE_TENSORS,
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS,
)
