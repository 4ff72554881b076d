"""OLMo 1 (arXiv 2402.00838): Llama with LayerNorm that has no parameters, and clipped q, k, v."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec, NormKind, NormSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_heads, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """The epsilon of the norms is not in the config."""
    sizes = read_sizes(config, max_position=2048)
    heads = read_heads(config, sizes.hidden_size)
    bias = config.boolean("attention_bias", default=False)
    attention = replace(
        heads.attention(
            read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
        ),
        qkv_bias=bias,
        out_bias=bias,
        qkv_clip=config.optional_number("clip_qkv", minimum=1e-3, default=None),
    )
    return pre_norm_decoder(
        config,
        model_type="olmo",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        norm=NormSpec(kind=NormKind.LAYER, eps=1e-5, gain=False),
    )


FAMILY = Family(
    model_type="olmo",
    build=build,
    tensors=LLAMA_TENSORS,
    ignored=LLAMA_IGNORED,
    computes=frozenset({"clip_qkv"}),
)
