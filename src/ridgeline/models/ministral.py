"""Ministral (Mistral AI): ``ministral`` is Mistral with windows on some layers.

``ministral3`` (2025) has YaRN and queries that grow with their position.
"""

from dataclasses import replace

from ridgeline.core.rope_spec import QueryGrowth
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
from ridgeline.models.rope_config import read_rope, rope_section
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """All layers have the window, unless ``layer_types`` says otherwise."""
    sizes = read_sizes(config, max_position=131_072)
    heads = read_heads(config, sizes.hidden_size)
    window = config.optional_integer("sliding_window", default=4096)
    default = [FULL if window is None else SLIDING] * sizes.num_layers
    kinds = read_layer_kinds(config, sizes.num_layers, default)
    attention = heads.attention(
        read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    )
    return pre_norm_decoder(
        config,
        model_type="ministral",
        sizes=sizes,
        attention=[replace(attention, window=each) for each in layer_windows(kinds, window)],
    )


def read_growth(config: ConfigReader, max_position: int) -> QueryGrowth | None:
    """How queries grow, from what stands beside the scaling of rope."""
    section = rope_section(config)
    section.ignore("max_position_embeddings")  # the config's own
    rate = section.number("llama_4_scaling_beta", minimum=0.0, maximum=1e3, default=0.0)
    length = section.integer("original_max_position_embeddings", default=max_position)
    return QueryGrowth(rate=rate, length=length) if rate else None


def build_3(config: ConfigReader) -> ModelSpec:
    """``llama_4_scaling_beta`` stands beside the scaling of rope, and counts in its length."""
    sizes = read_sizes(config, max_position=262_144)
    heads = read_heads(config, sizes.hidden_size, head_dim=128)
    growth = read_growth(config, sizes.max_position)
    rope = read_rope(
        config, head_dim=heads.head_dim, max_position=sizes.max_position, theta=1_000_000.0
    )
    attention = replace(
        heads.attention(rope),
        window=config.optional_integer("sliding_window", default=None),
        query_growth=growth,
    )
    return pre_norm_decoder(
        config,
        model_type="ministral3",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        norm=read_rms_norm(config, eps=1e-5),
    )


FAMILY = Family(model_type="ministral", build=build, tensors=LLAMA_TENSORS, ignored=LLAMA_IGNORED)
FAMILY_3 = replace(FAMILY, model_type="ministral3", build=build_3)
