"""StarCoder 2 (arXiv 2402.19173): LayerNorm, biases, a feed-forward network without a gate."""

from dataclasses import replace

from ridgeline.core.spec import MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_activation, read_heads, read_layer_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, NORM_BIASES, layer_tensors


def build(config: ConfigReader) -> ModelSpec:
    """``use_bias`` is for the projections; norms have a bias always."""
    sizes = read_sizes(config, max_position=4096)
    heads = read_heads(config, sizes.hidden_size, num_kv_heads=2)
    bias = config.boolean("use_bias", default=True)
    attention = replace(
        heads.attention(
            read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
        ),
        window=config.optional_integer("sliding_window", default=None),
        qkv_bias=bias,
        out_bias=bias,
    )
    activation = read_activation(config, "hidden_act", default="gelu_pytorch_tanh")
    mlp = MLPSpec(width=sizes.mlp_width, activation=activation, gated=False, bias=bias)
    return pre_norm_decoder(
        config,
        model_type="starcoder2",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlps=[mlp] * sizes.num_layers,
        norm=read_layer_norm(config, "norm_epsilon", bias=True),
        tied=True,
    )


FAMILY = Family(
    model_type="starcoder2",
    build=build,
    tensors=LLAMA_TENSORS
    | NORM_BIASES
    | layer_tensors({"up": "mlp.c_fc", "down": "mlp.c_proj"}, bias=True),
    ignored=LLAMA_IGNORED,
)
