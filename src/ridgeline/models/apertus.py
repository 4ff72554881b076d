"""Apertus (Swiss AI Initiative 2025, arXiv 2509.14233): norms of heads, xIELU without a gate."""

from dataclasses import replace

from ridgeline.core.rope_spec import Llama3Scaling, RopeSpec
from ridgeline.core.spec import Activation, MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import read_heads, read_rms_norm, read_sizes
from ridgeline.models.rope_config import read_rope, rope_section
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, layer_tensors

_THETA = 12_000_000.0
# Of a config that says nothing of positions (``ApertusConfig``).
_SCALING = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
)


def build(config: ConfigReader) -> ModelSpec:
    """``attention_bias`` is on all of attention."""
    config.refuse("hidden_act", unless=("xielu",))
    sizes = read_sizes(config, max_position=65_536, vocab_size=131_072)
    heads = read_heads(config, sizes.hidden_size)
    norm = read_rms_norm(config, eps=1e-5)
    bias = config.boolean("attention_bias", default=False)
    attention = replace(
        heads.attention(_rope(config, heads.head_dim, sizes.max_position)),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
    )
    mlp = MLPSpec(width=sizes.mlp_width, activation=Activation.IDENTITY, gated=False, xielu=True)
    return pre_norm_decoder(
        config,
        model_type="apertus",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlps=[mlp] * sizes.num_layers,
        norm=norm,
    )


def _rope(config: ConfigReader, head_dim: int, max_position: int) -> RopeSpec:
    absent = rope_section(config).is_empty()
    rope = read_rope(config, head_dim=head_dim, max_position=max_position, theta=_THETA)
    return replace(rope, scaling=_SCALING) if absent else rope


FAMILY = Family(
    model_type="apertus",
    build=build,
    tensors=LLAMA_TENSORS
    | layer_tensors({"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"})
    | {
        f"layers.{{i}}.xielu.{name}": TensorSource(name=f"model.layers.{{i}}.mlp.act_fn.{theirs}")
        for name, theirs in {
            "rise": "alpha_p", "fall": "alpha_n", "beta": "beta", "eps": "eps",
        }.items()
    },
    ignored=LLAMA_IGNORED,
)  # fmt: skip
