"""ERNIE 4.5 (Baidu, 2025): Llama with interleaved rope."""

from dataclasses import replace

from ridgeline.core.spec import AttentionSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import Heads, Sizes, read_heads, read_rms_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def ernie_attention(
    config: ConfigReader, sizes: Sizes, heads: Heads, *, bias: bool
) -> AttentionSpec:
    """The attention of all layers."""
    rope = read_rope(
        config, head_dim=heads.head_dim, max_position=sizes.max_position, theta=500_000.0
    )
    spec = heads.attention(replace(rope, interleaved=True))
    return replace(spec, qkv_bias=bias, out_bias=bias)


def build(config: ConfigReader) -> ModelSpec:
    """``use_bias`` is on all projections."""
    sizes = read_sizes(config, max_position=131_072, vocab_size=103_424)
    heads = read_heads(config, sizes.hidden_size, head_dim=128)
    bias = config.boolean("use_bias", default=False)
    return pre_norm_decoder(
        config,
        model_type="ernie4_5",
        sizes=sizes,
        attention=[ernie_attention(config, sizes, heads, bias=bias)] * sizes.num_layers,
        mlp_bias=bias,
        norm=read_rms_norm(config, eps=1e-5),
        tied=True,
    )


FAMILY = Family(model_type="ernie4_5", build=build, tensors=LLAMA_TENSORS, ignored=LLAMA_IGNORED)
