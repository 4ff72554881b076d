"""OLMo 2 (arXiv 2501.00656): norms after each branch instead of before, and on all of q and k."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.spec import AttentionSpec, ModelSpec, NormScope
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder, with_post_norms
from ridgeline.models.family import Family
from ridgeline.models.fields import Sizes, read_heads, read_rms_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, layer_tensors


def olmo_attention(config: ConfigReader, sizes: Sizes) -> AttentionSpec:
    """That of OLMo 2 and 3, without positions; ``attention_bias`` is on all projections."""
    bias = config.boolean("attention_bias", default=False)
    return replace(
        read_heads(config, sizes.hidden_size).attention(None),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=read_rms_norm(config, eps=1e-5),
        qk_norm_scope=NormScope.PROJECTION,
    )


def olmo_decoder(
    config: ConfigReader, *, model_type: str, sizes: Sizes, attention: Sequence[AttentionSpec]
) -> ModelSpec:
    """The branches read the residual stream as it is."""
    spec = pre_norm_decoder(
        config,
        model_type=model_type,
        sizes=sizes,
        attention=attention,
        norm=read_rms_norm(config, eps=1e-5),
    )
    return with_post_norms(spec, instead=True)


def build(config: ConfigReader) -> ModelSpec:
    """All layers are alike."""
    sizes = read_sizes(config, max_position=2048)
    attention = olmo_attention(config, sizes)
    rope = read_rope(config, head_dim=attention.head_dim, max_position=sizes.max_position)
    return olmo_decoder(
        config,
        model_type="olmo2",
        sizes=sizes,
        attention=[replace(attention, rope=rope)] * sizes.num_layers,
    )


OLMO_TENSORS = LLAMA_TENSORS | layer_tensors(
    {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
FAMILY = Family(
    model_type="olmo2",
    build=build,
    tensors=OLMO_TENSORS,
    ignored=LLAMA_IGNORED,
)
