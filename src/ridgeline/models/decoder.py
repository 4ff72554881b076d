"""The layer that Llama made common: norm, attention, norm, feed-forward; and its variations."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ridgeline.core.spec import (
    AttentionSpec,
    LayerSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    StateSpec,
)
from ridgeline.models.config import ConfigReader
from ridgeline.models.fields import Sizes, read_activation, read_rms_norm
from ridgeline.models.rope_config import extended_context


def pre_norm_decoder(
    config: ConfigReader,
    *,
    model_type: str,
    sizes: Sizes,
    attention: Iterable[AttentionSpec | MLASpec | StateSpec],
    mlps: Sequence[MLPSpec | MoESpec] = (),
    mlp_bias: bool = False,
    norm: NormSpec | None = None,
    parallel: bool = False,
    tied: bool = False,
) -> ModelSpec:
    """A decoder with the given attention in each layer; the rest is read from the config.

    Without ``mlps`` all layers have the same gated feed-forward network, and without ``norm`` the
    config's RMSNorm. ``tied`` is the default of ``tie_word_embeddings``.
    """
    attention = tuple(attention)
    norm = norm or read_rms_norm(config)
    if not mlps:
        activation = read_activation(config, "hidden_act", default="silu")
        mlp = MLPSpec(width=sizes.mlp_width, activation=activation, bias=mlp_bias)
        mlps = [mlp] * len(attention)
    ropes = [spec.rope for spec in attention if spec.rope is not None]
    return ModelSpec(
        model_type=model_type,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        layers=tuple(
            LayerSpec(
                attention=spec,
                mlp=mlp,
                attention_norm=norm,
                mlp_norm=None if parallel else norm,
                parallel=parallel,
            )
            for spec, mlp in zip(attention, mlps, strict=True)
        ),
        final_norm=norm,
        max_position=extended_context(sizes.max_position, ropes),
        tie_embeddings=config.boolean("tie_word_embeddings", default=tied),
    )


def with_post_norms(spec: ModelSpec, *, instead: bool = False) -> ModelSpec:
    """The output of each branch is normed too, or ``instead`` of its input.

    The first is GLM 4's layer, the second OLMo 2's.
    """
    norm = spec.final_norm
    layers = tuple(
        replace(
            layer,
            attention_norm=None if instead else layer.attention_norm,
            mlp_norm=None if instead else layer.mlp_norm,
            attention_post_norm=norm,
            mlp_post_norm=norm,
        )
        for layer in spec.layers
    )
    return replace(spec, layers=layers)
