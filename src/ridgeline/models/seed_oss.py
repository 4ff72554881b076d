"""Seed-OSS (ByteDance, 2025): Llama with biases on q, k and v, and perhaps on the output."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_heads, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """``attention_bias`` is that of q, k and v; ``attention_out_bias`` the output's."""
    sizes = read_sizes(config, max_position=524_288, vocab_size=155_136)
    heads = read_heads(config, sizes.hidden_size, head_dim=128)
    rope = read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    attention = replace(
        heads.attention(rope),
        qkv_bias=config.boolean("attention_bias", default=True),
        out_bias=config.boolean("attention_out_bias", default=False),
    )
    return pre_norm_decoder(
        config,
        model_type="seed_oss",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlp_bias=config.boolean("mlp_bias", default=False),
    )


FAMILY = Family(model_type="seed_oss", build=build, tensors=LLAMA_TENSORS, ignored=LLAMA_IGNORED)
