"""AFM-4.5B (Arcee, 2025): Llama whose feed-forward has no gate, and the square of a ReLU."""

from dataclasses import replace

from ridgeline.core.spec import MLPSpec, ModelSpec, NormSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_activation, read_heads, read_rms_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def squared_relu_decoder(
    config: ConfigReader,
    *,
    model_type: str,
    norm: NormSpec,
    max_position: int,
    biased: bool = False,
    partial: float | None = None,
) -> ModelSpec:
    """A decoder whose networks have no gates; ``attention_bias`` is on all of attention.

    ``max_position``, ``biased`` and ``partial`` (see `read_rope`) are the family's defaults.
    """
    sizes = read_sizes(config, max_position=max_position)
    heads = read_heads(config, sizes.hidden_size)
    bias = config.boolean("attention_bias", default=biased)
    rope = read_rope(
        config, head_dim=heads.head_dim, max_position=sizes.max_position, partial=partial
    )
    mlp = MLPSpec(
        width=sizes.mlp_width,
        activation=read_activation(config, "hidden_act", default="relu2"),
        gated=False,
        bias=config.boolean("mlp_bias", default=biased),
    )
    return pre_norm_decoder(
        config,
        model_type=model_type,
        sizes=sizes,
        attention=[replace(heads.attention(rope), qkv_bias=bias, out_bias=bias)] * sizes.num_layers,
        mlps=[mlp] * sizes.num_layers,
        norm=norm,
    )


def build(config: ConfigReader) -> ModelSpec:
    """Norms are RMSNorms."""
    norm = read_rms_norm(config, eps=1e-5)
    return squared_relu_decoder(config, model_type="arcee", norm=norm, max_position=4096)


FAMILY = Family(model_type="arcee", build=build, tensors=LLAMA_TENSORS, ignored=LLAMA_IGNORED)
