"""Qwen 2 and 2.5 (arXiv 2407.10671, 2412.15115): biases on q, k and v, windows on late layers."""

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
    read_sizes,
)
from ridgeline.models.rope_config import read_ropes
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def read_windows(
    config: ConfigReader, num_layers: int
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Kind and window of each layer.

    With ``use_sliding_window``, layers from ``max_window_layers`` on have the window, unless
    ``layer_types`` says otherwise; without, none has.
    """
    uses_window = config.boolean("use_sliding_window", default=False)
    window = config.optional_integer("sliding_window", default=4096)
    window = window if uses_window else None
    first = config.integer("max_window_layers", minimum=0, default=28)
    default = [FULL if window is None or layer < first else SLIDING for layer in range(num_layers)]
    kinds = read_layer_kinds(config, num_layers, default)
    return kinds, layer_windows(kinds, window)


def build(config: ConfigReader) -> ModelSpec:
    """Grouped-query attention with biases on q, k and v, and SwiGLU."""
    sizes = read_sizes(config, max_position=32_768)
    heads = read_heads(config, sizes.hidden_size)
    kinds, windows = read_windows(config, sizes.num_layers)
    ropes = read_ropes(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    attention = (
        replace(
            heads.attention(ropes[kind]),
            window=window,
            qkv_bias=True,
        )
        for kind, window in zip(kinds, windows, strict=True)
    )
    return pre_norm_decoder(config, model_type="qwen2", sizes=sizes, attention=attention)


FAMILY = Family(model_type="qwen2", build=build, tensors=LLAMA_TENSORS, ignored=LLAMA_IGNORED)
