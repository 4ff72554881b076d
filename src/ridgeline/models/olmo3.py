"""OLMo 3 (Ai2, 2025): OLMo 2 with windows on three layers of four, whose rope is not scaled."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family
from ridgeline.models.fields import FULL, SLIDING, layer_windows, read_layer_kinds, read_sizes
from ridgeline.models.olmo2 import OLMO_TENSORS, olmo_attention, olmo_decoder
from ridgeline.models.rope_config import (
    nested_by_kind,
    plain_rope,
    read_nested_ropes,
    read_rope,
)
from ridgeline.models.tensor_names import LLAMA_IGNORED

_THETA = 500_000.0


def build(config: ConfigReader) -> ModelSpec:
    """In the old spelling ``rope_scaling`` is for layers without a window only."""
    sizes = read_sizes(config, max_position=2048)
    attention = olmo_attention(config, sizes)
    default = [FULL if (layer + 1) % 4 == 0 else SLIDING for layer in range(sizes.num_layers)]
    kinds = read_layer_kinds(config, sizes.num_layers, default)
    windows = layer_windows(kinds, config.optional_integer("sliding_window", default=4096))
    head_dim, theta = attention.head_dim, config.number("rope_theta", minimum=2, default=_THETA)
    if nested_by_kind(config):
        ropes = read_nested_ropes(
            config,
            head_dim=head_dim,
            max_position=sizes.max_position,
            thetas=dict.fromkeys((FULL, SLIDING), theta),
        )
    else:
        full = read_rope(config, head_dim=head_dim, max_position=sizes.max_position, theta=_THETA)
        ropes = {FULL: full, SLIDING: plain_rope(head_dim=head_dim, theta=full.theta)}
    return olmo_decoder(
        config,
        model_type="olmo3",
        sizes=sizes,
        attention=[
            replace(attention, rope=ropes[kind], window=window)
            for kind, window in zip(kinds, windows, strict=True)
        ],
    )


FAMILY = Family(model_type="olmo3", build=build, tensors=OLMO_TENSORS, ignored=LLAMA_IGNORED)
