"""Nemotron-4 and Minitron (NVIDIA 2024, arXiv 2402.16819): LayerNorm plus one, squared ReLU."""

from dataclasses import replace

from ridgeline.core.spec import MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_activation, read_heads, read_layer_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, NORM_BIASES


def build(config: ConfigReader) -> ModelSpec:
    """Half of each head is rotated, the feed-forward has no gate, norms are stored minus one."""
    sizes = read_sizes(config, max_position=4096)
    heads = read_heads(config, sizes.hidden_size)
    bias = config.boolean("attention_bias", default=False)
    rope = read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position, partial=0.5)
    mlp = MLPSpec(
        width=sizes.mlp_width,
        activation=read_activation(config, "hidden_act", default="relu2"),
        gated=False,
        bias=config.boolean("mlp_bias", default=False),
    )
    return pre_norm_decoder(
        config,
        model_type="nemotron",
        sizes=sizes,
        attention=[replace(heads.attention(rope), qkv_bias=bias, out_bias=bias)] * sizes.num_layers,
        mlps=[mlp] * sizes.num_layers,
        norm=replace(read_layer_norm(config, "norm_eps", bias=True), unit_offset=True),
    )


FAMILY = Family(
    model_type="nemotron",
    build=build,
    tensors=LLAMA_TENSORS | NORM_BIASES,
    ignored=LLAMA_IGNORED,
    computes=frozenset({"partial_rotary_factor"}),
)
