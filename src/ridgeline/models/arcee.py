"""AFM-4.5B (Arcee, 2025): Llama whose feed-forward has no gate, and the square of a ReLU."""

from dataclasses import replace

from ridgeline.core.spec import MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_activation, read_heads, read_rms_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """``attention_bias`` is on all projections of attention."""
    sizes = read_sizes(config, max_position=4096)
    heads = read_heads(config, sizes.hidden_size)
    bias = config.boolean("attention_bias", default=False)
    rope = read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    mlp = MLPSpec(
        width=sizes.mlp_width,
        activation=read_activation(config, "hidden_act", default="relu2"),
        gated=False,
        bias=config.boolean("mlp_bias", default=False),
    )
    return pre_norm_decoder(
        config,
        model_type="arcee",
        sizes=sizes,
        attention=[replace(heads.attention(rope), qkv_bias=bias, out_bias=bias)] * sizes.num_layers,
        mlps=[mlp] * sizes.num_layers,
        norm=read_rms_norm(config, eps=1e-5),
    )


FAMILY = Family(model_type="arcee", build=build, tensors=LLAMA_TENSORS, ignored=LLAMA_IGNORED)
