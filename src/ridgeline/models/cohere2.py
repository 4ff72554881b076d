"""Command R7B and A (Cohere, 2024–25): windows with rope by turns with layers of no positions."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec
from ridgeline.models.cohere import cohere_decoder
from ridgeline.models.config import ConfigReader
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

# What the first published configs say besides, of the only kind that there is.
_FIXED: dict[str, tuple[object, ...]] = {
    "use_qk_norm": (False,),
    "use_parallel_block": (True,),
    "use_gated_activation": (True,),
    "use_embedding_sharing": (True,),
    "layer_switch": (),
    "rotary_pct": (1, 1.0),
}


def build(config: ConfigReader) -> ModelSpec:
    """Every fourth layer sees everything, unless ``layer_types`` says otherwise."""
    pattern = config.integer("sliding_window_pattern", default=4)
    for name, values in _FIXED.items():
        config.refuse(name, unless=(pattern,) if name == "layer_switch" else values)
    sizes = read_sizes(config, max_position=8192)
    heads = read_heads(config, sizes.hidden_size)
    default = [SLIDING if (layer + 1) % pattern else FULL for layer in range(sizes.num_layers)]
    kinds = read_layer_kinds(config, sizes.num_layers, default)
    windows = layer_windows(kinds, config.optional_integer("sliding_window", default=4096))
    rope = read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    bias = config.boolean("attention_bias", default=False)
    attention = [
        replace(
            heads.attention(None if window is None else replace(rope, interleaved=True)),
            window=window,
            qkv_bias=bias,
            out_bias=bias,
        )
        for window in windows
    ]
    return cohere_decoder(config, model_type="cohere2", sizes=sizes, attention=attention)


FAMILY = Family(
    model_type="cohere2",
    build=build,
    tensors=LLAMA_TENSORS,
    ignored=LLAMA_IGNORED,
    computes=frozenset({"logit_scale"}),
)
