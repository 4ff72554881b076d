"""Mistral (Jiang et al. 2023, arXiv 2310.06825): Llama with a sliding window in every layer."""

from dataclasses import replace

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import FULL, SLIDING, read_heads, read_layer_kinds, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """Without ``sliding_window`` it is 4096, as in version 0.1; ``null`` is none (0.2 and on)."""
    sizes = read_sizes(config, max_position=131_072)
    heads = read_heads(config, sizes.hidden_size)
    window = config.optional_integer("sliding_window", default=4096)
    kinds = [FULL if window is None else SLIDING] * sizes.num_layers
    if list(read_layer_kinds(config, sizes.num_layers, default=kinds)) != kinds:
        raise UnsupportedModelError(
            "config.json gives layer_types that sliding_window contradicts; in Mistral models all "
            "layers are of one kind."
        )
    attention = replace(
        heads.attention(
            read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
        ),
        window=window,
    )
    return pre_norm_decoder(
        config, model_type="mistral", sizes=sizes, attention=[attention] * sizes.num_layers
    )


FAMILY = Family(model_type="mistral", build=build, tensors=LLAMA_TENSORS, ignored=LLAMA_IGNORED)
