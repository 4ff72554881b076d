"""Command R (Cohere, 2024): parallel branches, LayerNorm without bias, interleaved rope."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.spec import AttentionSpec, ModelSpec, NormScope
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import Sizes, read_heads, read_layer_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """``use_qk_norm`` (Command R+) has a gain for each head; ``logit_scale`` multiplies logits."""
    sizes = read_sizes(config, max_position=8192)
    heads = read_heads(config, sizes.hidden_size)
    bias = config.boolean("attention_bias", default=False)
    norm = read_layer_norm(config, "layer_norm_eps", bias=False)
    rope = read_rope(
        config, head_dim=heads.head_dim, max_position=sizes.max_position, theta=500_000.0
    )
    qk_norm = norm if config.boolean("use_qk_norm", default=False) else None
    attention = replace(
        heads.attention(replace(rope, interleaved=True)),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=qk_norm,
        qk_norm_scope=NormScope.HEAD if qk_norm is None else NormScope.EACH_HEAD,
    )
    return cohere_decoder(
        config, model_type="cohere", sizes=sizes, attention=[attention] * sizes.num_layers
    )


def cohere_decoder(
    config: ConfigReader, *, model_type: str, sizes: Sizes, attention: Sequence[AttentionSpec]
) -> ModelSpec:
    """What Command R and its successors share."""
    spec = pre_norm_decoder(
        config,
        model_type=model_type,
        sizes=sizes,
        attention=attention,
        norm=read_layer_norm(config, "layer_norm_eps", bias=False),
        parallel=True,
        tied=True,
    )
    logit_scale = config.number("logit_scale", minimum=1e-9, maximum=1e9, default=0.0625)
    return replace(spec, logit_scale=logit_scale)


FAMILY = Family(
    model_type="cohere",
    build=build,
    tensors=LLAMA_TENSORS,
    ignored=LLAMA_IGNORED,
    computes=frozenset({"logit_scale"}),
)
