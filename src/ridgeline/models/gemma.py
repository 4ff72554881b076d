"""Gemma 1 (arXiv 2403.08295): Llama with scaled embeddings, offset norms and GELU."""

from dataclasses import replace

from ridgeline.core.spec import Activation, MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_activation, read_heads, read_rms_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """``embedding_scale`` is √D in full; executors round it to their number format, as Gemma."""
    config.refuse("use_bidirectional_attention", unless=(False,))
    config.ignore("hidden_activation")  # some configs have both, and only hidden_act counts
    sizes = read_sizes(config, max_position=8192)
    heads = read_heads(config, sizes.hidden_size, head_dim=256)
    bias = config.boolean("attention_bias", default=False)
    attention = replace(
        heads.attention(
            read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
        ),
        qkv_bias=bias,
        out_bias=bias,
    )
    activation = read_activation(config, "hidden_act", default="gelu_pytorch_tanh")
    if activation is Activation.GELU:  # the first configs say "gelu" and mean the approximation
        activation = Activation.GELU_TANH
    spec = pre_norm_decoder(
        config,
        model_type="gemma",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlps=[MLPSpec(width=sizes.mlp_width, activation=activation)] * sizes.num_layers,
        norm=read_rms_norm(config, unit_offset=True),
        tied=True,
    )
    return replace(spec, embedding_scale=sizes.hidden_size**0.5)


FAMILY = Family(model_type="gemma", build=build, tensors=LLAMA_TENSORS, ignored=LLAMA_IGNORED)
