"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373): parallel branches with norms of their own."""

from dataclasses import replace

from ridgeline.core.spec import MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import read_activation, read_heads, read_layer_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import fused_tensors


def build(config: ConfigReader) -> ModelSpec:
    """Part of each head is rotated; ``use_parallel_residual`` false makes branches sequential."""
    sizes = read_sizes(config, max_position=2048, vocab_size=50_432)
    heads = read_heads(config, sizes.hidden_size)
    rope = read_rope(
        config,
        head_dim=heads.head_dim,
        max_position=sizes.max_position,
        theta=config.number("rotary_emb_base", minimum=2.0, default=10_000.0),
        partial=config.number("rotary_pct", minimum=0.0, maximum=1.0, default=0.25),
    )
    bias = config.boolean("attention_bias", default=True)
    attention = replace(heads.attention(rope), qkv_bias=bias, out_bias=bias)
    activation = read_activation(config, "hidden_act", default="gelu")
    mlp = MLPSpec(width=sizes.mlp_width, activation=activation, gated=False, bias=True)
    spec = pre_norm_decoder(
        config,
        model_type="gpt_neox",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        mlps=[mlp] * sizes.num_layers,
        norm=read_layer_norm(config, "layer_norm_eps", bias=True),
    )
    parallel = config.boolean("use_parallel_residual", default=True)
    return replace(spec, layers=tuple(replace(layer, parallel=parallel) for layer in spec.layers))


_LAYER = "gpt_neox.layers.{i}"
_MODULES = {
    "attention_norm": "input_layernorm",
    "o": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
_KINDS = {"weight": "", "bias": "_bias"}
_QKV = {
    f"{_LAYER}.attention.query_key_value.{kind}": tuple(
        f"layers.{{i}}.{name}{end}" for name in "qkv"
    )
    for kind, end in _KINDS.items()
}
FAMILY = Family(
    model_type="gpt_neox",
    build=build,
    tensors={
        "embed": TensorSource(name="gpt_neox.embed_in.weight"),
        "head": TensorSource(name="embed_out.weight"),
        **{
            f"final_norm{end}": TensorSource(name=f"gpt_neox.final_layer_norm.{kind}")
            for kind, end in _KINDS.items()
        },
        **{
            f"layers.{{i}}.{name}{end}": TensorSource(name=f"{_LAYER}.{module}.{kind}")
            for name, module in _MODULES.items()
            for kind, end in _KINDS.items()
        },
        **fused_tensors(_QKV),
    },
    fused_heads=_QKV,
    # Masks and frequencies that old checkpoints carry.
    ignored=(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    computes=frozenset({"partial_rotary_factor"}),
)
