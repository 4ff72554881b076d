"""dots.llm1 (rednote 2025, arXiv 2506.05767): DeepSeek-V3's experts, Qwen 3's attention."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.deepseek_v2 import deepseek_decoder
from ridgeline.models.deepseek_v3 import SIGMOID_MOE_TENSORS, read_sigmoid_routing
from ridgeline.models.family import Family
from ridgeline.models.fields import (
    FULL,
    SLIDING,
    layer_windows,
    read_heads,
    read_layer_kinds,
    read_rms_norm,
    read_sizes,
)
from ridgeline.models.moe_config import EXPERT_KEYS, read_num_experts
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """Layers from ``max_window_layers`` on have the window, if there is one."""
    sizes = read_sizes(config, max_position=2048)
    heads = read_heads(config, sizes.hidden_size)
    window = config.optional_integer("sliding_window", default=4096)
    first = config.integer("max_window_layers", minimum=0, default=62)
    default = [
        FULL if window is None or layer < first else SLIDING for layer in range(sizes.num_layers)
    ]
    kinds = read_layer_kinds(config, sizes.num_layers, default)
    bias = config.boolean("attention_bias", default=False)
    shared = replace(
        heads.attention(
            read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
        ),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=read_rms_norm(config),
    )
    num_experts = read_num_experts(config, "n_routed_experts", "num_local_experts")
    return deepseek_decoder(
        config,
        model_type="dots1",
        sizes=sizes,
        attention=[replace(shared, window=each) for each in layer_windows(kinds, window)],
        num_experts=num_experts,
        routing=read_sigmoid_routing(config, num_experts, top_k=None, normalised=False),
        num_shared=0,
        num_dense=0,
    )


FAMILY = Family(
    model_type="dots1",
    build=build,
    tensors=LLAMA_TENSORS | SIGMOID_MOE_TENSORS,
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS,
)
