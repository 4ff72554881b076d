"""Phi-1, 1.5 and 2 (arXiv 2306.11644, 2309.05463): parallel branches, biases everywhere."""

from dataclasses import replace

from ridgeline.core.spec import MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import read_activation, read_heads, read_layer_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, NORM_BIASES, layer_tensors


def build(config: ConfigReader) -> ModelSpec:
    """Part of each head is rotated; the head of the model has a bias too."""
    sizes = read_sizes(config, max_position=2048)
    heads = read_heads(config, sizes.hidden_size)
    norm = read_layer_norm(config, "layer_norm_eps", bias=True)
    attention = replace(
        heads.attention(
            read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position, partial=0.5)
        ),
        qkv_bias=True,
        out_bias=True,
        qk_norm=norm if config.boolean("qk_layernorm", default=False) else None,
    )
    activation = read_activation(config, "hidden_act", default="gelu_new")
    mlp = MLPSpec(width=sizes.mlp_width, activation=activation, gated=False, bias=True)
    spec = pre_norm_decoder(
        config,
        model_type="phi",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlps=[mlp] * sizes.num_layers,
        norm=norm,
        parallel=True,
    )
    return replace(spec, head_bias=True)


FAMILY = Family(
    model_type="phi",
    build=build,
    tensors=LLAMA_TENSORS
    | NORM_BIASES
    | layer_tensors(
        {
            "o": "self_attn.dense",
            "up": "mlp.fc1",
            "down": "mlp.fc2",
            "q_norm": "self_attn.q_layernorm",
            "k_norm": "self_attn.k_layernorm",
        },
        bias=True,
    )
    | {
        "final_norm": TensorSource(name="model.final_layernorm.weight"),
        "final_norm_bias": TensorSource(name="model.final_layernorm.bias"),
        "head_bias": TensorSource(name="lm_head.bias"),
    },
    ignored=LLAMA_IGNORED,
    computes=frozenset({"partial_rotary_factor"}),
)
