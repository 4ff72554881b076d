"""The layer that Llama made common: RMSNorm, attention, RMSNorm, gated feed-forward."""

from collections.abc import Iterable

from ridgeline.core.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.fields import Sizes, read_activation, read_rms_norm
from ridgeline.models.rope_config import extended_context


def pre_norm_decoder(
    config: ConfigReader,
    *,
    model_type: str,
    sizes: Sizes,
    attention: Iterable[AttentionSpec],
    mlp_bias: bool = False,
) -> ModelSpec:
    """A decoder with the given attention in each layer; the rest is read from the config."""
    attention = tuple(attention)
    norm = read_rms_norm(config)
    mlp = MLPSpec(
        width=sizes.mlp_width,
        activation=read_activation(config, "hidden_act", default="silu"),
        bias=mlp_bias,
    )
    ropes = [spec.rope for spec in attention if spec.rope is not None]
    return ModelSpec(
        model_type=model_type,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        layers=tuple(
            LayerSpec(attention=spec, mlp=mlp, attention_norm=norm, mlp_norm=norm)
            for spec in attention
        ),
        final_norm=norm,
        max_position=extended_context(sizes.max_position, ropes),
        tie_embeddings=config.boolean("tie_word_embeddings", default=False),
    )
