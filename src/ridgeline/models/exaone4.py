"""EXAONE 4 (LG AI Research 2025, arXiv 2507.11407): windows by turns with NoPE layers."""

from dataclasses import replace

from ridgeline.core.spec import AttentionSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder, with_post_norms
from ridgeline.models.family import Family
from ridgeline.models.fields import (
    FULL,
    SLIDING,
    Sizes,
    layer_windows,
    read_heads,
    read_layer_kinds,
    read_rms_norm,
    read_sizes,
)
from ridgeline.models.olmo2 import OLMO_TENSORS
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED


def exaone_attention(config: ConfigReader, sizes: Sizes) -> list[AttentionSpec]:
    """Layers without a window have no rope, unless no layer of the model has a window (1.2B)."""
    heads = read_heads(config, sizes.hidden_size)
    window = config.optional_integer("sliding_window", default=4096)
    if "layer_types" in config:  # then the pattern is not read, which may be letters
        config.ignore("sliding_window_pattern")
        default = []
    elif window is None:
        config.ignore("sliding_window_pattern")
        default = [FULL] * sizes.num_layers
    else:
        every = config.integer("sliding_window_pattern", default=4)
        default = [SLIDING if (layer + 1) % every else FULL for layer in range(sizes.num_layers)]
    kinds = read_layer_kinds(config, sizes.num_layers, default)
    rope = read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    norm = read_rms_norm(config, eps=1e-5)
    return [
        replace(
            heads.attention(rope if window is None or kind == SLIDING else None),
            window=layer_window,
            qk_norm=norm,
        )
        for kind, layer_window in zip(kinds, layer_windows(kinds, window), strict=True)
    ]


def build(config: ConfigReader) -> ModelSpec:
    """Norms stand behind the branches, and on the heads of q and k."""
    sizes = read_sizes(config, max_position=2048)
    spec = pre_norm_decoder(
        config,
        model_type="exaone4",
        sizes=sizes,
        attention=exaone_attention(config, sizes),
        norm=read_rms_norm(config, eps=1e-5),
    )
    return with_post_norms(spec, instead=True)


FAMILY = Family(model_type="exaone4", build=build, tensors=OLMO_TENSORS, ignored=LLAMA_IGNORED)
