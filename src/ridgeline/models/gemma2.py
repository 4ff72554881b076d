"""Gemma 2 (arXiv 2408.00118): norms after each branch too, soft caps, windows by turns.

VaultGemma (Google 2025, arXiv 2510.15001) lacks the norms after the branches.
"""

from collections.abc import Iterable
from dataclasses import replace

from ridgeline.core.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family
from ridgeline.models.fields import (
    FULL,
    SLIDING,
    Sizes,
    layer_windows,
    read_activation,
    read_heads,
    read_layer_kinds,
    read_rms_norm,
    read_sizes,
)
from ridgeline.models.rope_config import extended_context, read_ropes
from ridgeline.models.tensor_names import GEMMA_TENSORS, LLAMA_IGNORED

MIN_CAP = 1e-3


def gemma_decoder(
    config: ConfigReader,
    *,
    model_type: str,
    sizes: Sizes,
    attention: Iterable[AttentionSpec],
    logit_softcap: float | None,
    max_position: int,
    unit_offset: bool = True,
) -> ModelSpec:
    """A Gemma decoder with the given attention in each layer; the rest is read from the config.

    ``embedding_scale`` is √D in full; executors round it to their number format, as Gemma does.
    """
    norm = read_rms_norm(config, unit_offset=unit_offset)
    config.ignore("hidden_act")  # configs have both, and only hidden_activation counts
    activation = read_activation(config, "hidden_activation", default="gelu_pytorch_tanh")
    mlp = MLPSpec(width=sizes.mlp_width, activation=activation)
    return ModelSpec(
        model_type=model_type,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        layers=tuple(
            LayerSpec(
                attention=spec,
                mlp=mlp,
                attention_norm=norm,
                mlp_norm=norm,
                attention_post_norm=norm,
                mlp_post_norm=norm,
            )
            for spec in attention
        ),
        final_norm=norm,
        max_position=max_position,
        tie_embeddings=config.boolean("tie_word_embeddings", default=True),
        embedding_scale=sizes.hidden_size**0.5,
        logit_softcap=logit_softcap,
    )


def build(config: ConfigReader) -> ModelSpec:
    """Attention scale from ``query_pre_attn_scalar``; windows from the first layer on, by turns."""
    config.refuse("use_bidirectional_attention", unless=(False,))
    sizes = read_sizes(config, max_position=8192)
    heads = read_heads(config, sizes.hidden_size, head_dim=256)
    by_turns = [FULL if layer % 2 else SLIDING for layer in range(sizes.num_layers)]
    kinds = read_layer_kinds(config, sizes.num_layers, default=by_turns)
    windows = layer_windows(kinds, config.optional_integer("sliding_window", default=4096))
    ropes = read_ropes(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    bias = config.boolean("attention_bias", default=False)
    scalar = config.number("query_pre_attn_scalar", minimum=1e-3, default=256)
    softcap = config.optional_number("attn_logit_softcapping", minimum=MIN_CAP, default=50.0)
    attention = (
        replace(
            heads.attention(ropes[kind]),
            scale=scalar**-0.5,
            window=window,
            softcap=softcap,
            qkv_bias=bias,
            out_bias=bias,
        )
        for kind, window in zip(kinds, windows, strict=True)
    )
    return gemma_decoder(
        config,
        model_type="gemma2",
        sizes=sizes,
        attention=attention,
        logit_softcap=config.optional_number(
            "final_logit_softcapping", minimum=MIN_CAP, default=30.0
        ),
        max_position=extended_context(sizes.max_position, ropes.values()),
    )


def build_vault(config: ConfigReader) -> ModelSpec:
    """Norms before each branch alone."""
    spec = build(config)
    layers = (replace(layer, attention_post_norm=None, mlp_post_norm=None) for layer in spec.layers)
    return replace(spec, model_type="vaultgemma", layers=tuple(layers))


FAMILY = Family(model_type="gemma2", build=build, tensors=GEMMA_TENSORS, ignored=LLAMA_IGNORED)
VAULT_GEMMA = replace(FAMILY, model_type="vaultgemma", build=build_vault)
