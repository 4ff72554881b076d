"""Code World Model (Meta 2025, arXiv 2510.02387): Llama 3 with windows on three layers of four."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
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
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """The first of four layers sees everything, unless ``layer_types`` says otherwise."""
    sizes = read_sizes(config, max_position=131_072)
    heads = read_heads(config, sizes.hidden_size, head_dim=128)
    default = [SLIDING if layer % 4 else FULL for layer in range(sizes.num_layers)]
    kinds = read_layer_kinds(config, sizes.num_layers, default)
    windows = layer_windows(kinds, config.optional_integer("sliding_window", default=8192))
    rope = read_rope(
        config, head_dim=heads.head_dim, max_position=sizes.max_position, theta=1_000_000.0
    )
    return pre_norm_decoder(
        config,
        model_type="cwm",
        sizes=sizes,
        attention=[replace(heads.attention(rope), window=window) for window in windows],
        mlp_bias=config.boolean("mlp_bias", default=False),
        norm=read_rms_norm(config, eps=1e-5),
    )


FAMILY = Family(model_type="cwm", build=build, tensors=LLAMA_TENSORS, ignored=LLAMA_IGNORED)
