"""Granite 3 (IBM, 2024): Llama with four multipliers, after μP (arXiv 2203.03466)."""

from dataclasses import replace

from ridgeline.core.spec import AttentionSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder, with_post_norms
from ridgeline.models.family import Family
from ridgeline.models.fields import read_heads, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, layer_tensors

_NAMES = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)
MULTIPLIERS = frozenset(_NAMES)


def build(config: ConfigReader) -> ModelSpec:
    """``attention_multiplier`` is the scale of attention; logits are divided by their number."""
    attention_scale, embedding_scale, logits_scaling, residual_scale = (
        config.number(name, minimum=1e-9, maximum=1e9, default=1.0) for name in _NAMES
    )
    sizes = read_sizes(config, max_position=2048)
    heads = read_heads(config, sizes.hidden_size)
    bias = config.boolean("attention_bias", default=False)
    attention = replace(
        heads.attention(
            read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
        ),
        scale=attention_scale,
        qkv_bias=bias,
        out_bias=bias,
    )
    spec = pre_norm_decoder(
        config,
        model_type="granite",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlp_bias=config.boolean("mlp_bias", default=False),
    )
    return replace(
        spec,
        layers=tuple(
            replace(layer, attention_scale=residual_scale, mlp_scale=residual_scale)
            for layer in spec.layers
        ),
        embedding_scale=embedding_scale,
        logit_scale=1.0 / logits_scaling,
    )


def build_hyperclovax(config: ConfigReader) -> ModelSpec:
    """HyperCLOVA X (Naver 2025): logits multiplied by their number, norms behind branches, too.

    Without ``attention_multiplier`` scores are divided by √d.
    """
    spec = build(config)
    if config.boolean("use_post_norm", default=True):
        spec = with_post_norms(spec)
    if "attention_multiplier" not in config:
        layers = (
            replace(layer, attention=replace(layer.attention, scale=layer.attention.head_dim**-0.5))
            for layer in spec.layers
            if isinstance(layer.attention, AttentionSpec)
        )
        spec = replace(spec, layers=tuple(layers))
    return replace(spec, model_type="hyperclovax", logit_scale=1.0 / spec.logit_scale)


FAMILY = Family(
    model_type="granite",
    build=build,
    tensors=LLAMA_TENSORS,
    ignored=LLAMA_IGNORED,
    computes=MULTIPLIERS,
)
HYPERCLOVAX = replace(
    FAMILY,
    model_type="hyperclovax",
    build=build_hyperclovax,
    tensors=LLAMA_TENSORS
    | layer_tensors({"attention_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"}),
)
