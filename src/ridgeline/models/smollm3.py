"""SmolLM 3 (Hugging Face, 2025): Llama with layers that have no rotary positions (NoPE).

SmolLM and SmolLM 2 are of type ``llama``.
"""

from dataclasses import replace

from ridgeline.core.errors import CorruptFileError
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
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """Every fourth layer without rope; with ``use_sliding_window`` those have the window."""
    config.ignore("pretraining_tp")  # configs say 2; transformers does not read it
    config.ignore("max_window_layers")  # nor this
    sizes = read_sizes(config, max_position=32_768)
    heads = read_heads(config, sizes.hidden_size)
    rotated = _rotated_layers(config, sizes.num_layers)
    window = config.optional_integer("sliding_window", default=None)
    if not config.boolean("use_sliding_window", default=False):
        window = None
    default = [FULL if window is None or rotates else SLIDING for rotates in rotated]
    kinds = read_layer_kinds(config, sizes.num_layers, default)
    rope = read_rope(
        config, head_dim=heads.head_dim, max_position=sizes.max_position, theta=2_000_000.0
    )
    bias = config.boolean("attention_bias", default=False)
    attention = (
        replace(
            heads.attention(rope if rotates else None),
            window=layer_window,
            qkv_bias=bias,
            out_bias=bias,
        )
        for rotates, layer_window in zip(rotated, layer_windows(kinds, window), strict=True)
    )
    return pre_norm_decoder(
        config,
        model_type="smollm3",
        sizes=sizes,
        attention=attention,
        mlp_bias=config.boolean("mlp_bias", default=False),
        tied=True,
    )


def _rotated_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Whether each layer has rope: the entry of ``no_rope_layers`` is 1 (in spite of the name)."""
    interval = config.integer("no_rope_layer_interval", default=4)
    entries = config.integers("no_rope_layers", minimum=0)
    if entries is None:
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(entries) < num_layers:
        raise CorruptFileError(
            f"config.json lists {len(entries)} no_rope_layers for {num_layers} layers."
        )
    return [entry != 0 for entry in entries[:num_layers]]


FAMILY = Family(
    model_type="smollm3",
    build=build,
    tensors=LLAMA_TENSORS,
    ignored=LLAMA_IGNORED,
    computes=frozenset({"pretraining_tp"}),
)
