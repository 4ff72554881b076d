"""LFM2 (Liquid AI, arXiv 2511.23404): gated short convolutions, and attention in a few layers."""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.rounding import round_up
from ridgeline.core.spec import (
    Activation,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormKind,
    NormSpec,
    ShortConvSpec,
)
from ridgeline.models.config import ConfigReader, show
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import FULL, Sizes, read_heads, read_sizes
from ridgeline.models.rope_config import extended_context, read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, layer_tensors

CONV = "conv"
MAX_CONV_LENGTH = 16  # inputs that a convolution sums
# Of the first checkpoints; transformers reads none of them.
_INERT = (
    "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init",
    "conv_use_xavier_init", "num_heads",
)  # fmt: skip


def build(config: ConfigReader) -> ModelSpec:
    """The feed-forward network is two thirds as wide as the config says, if that is adjusted."""
    for name in (*_INERT, "full_attn_idxs"):
        config.ignore(name)
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        config.refuse(name, unless=(config.integer("hidden_size"),))
    for name in ("block_use_swiglu", "use_pos_enc"):
        config.refuse(name, unless=(True,))
    sizes = read_sizes(config, max_position=128_000, vocab_size=65_536, mlp_width=_width(config))
    mlp = MLPSpec(width=sizes.mlp_width, activation=Activation.SILU)
    return conv_decoder(config, model_type="lfm2", sizes=sizes, mlps=[mlp] * sizes.num_layers)


def conv_decoder(
    config: ConfigReader, *, model_type: str, sizes: Sizes, mlps: Sequence[MLPSpec | MoESpec]
) -> ModelSpec:
    """Attention in some layers, short convolutions in the others, and these networks."""
    heads = read_heads(config, sizes.hidden_size, num_kv_heads=8)
    eps = config.number("norm_eps", minimum=1e-15, maximum=1.0, default=1e-5)
    norm = NormSpec(kind=NormKind.RMS, eps=eps)
    rope = read_rope(
        config, head_dim=heads.head_dim, max_position=sizes.max_position, theta=1_000_000.0
    )
    attention = replace(
        heads.attention(rope),
        qk_norm=norm,
    )
    conv = ShortConvSpec(
        length=config.integer("conv_L_cache", minimum=2, maximum=MAX_CONV_LENGTH, default=3),
        bias=config.boolean("conv_bias", default=False),
    )
    layers = (
        LayerSpec(
            attention=attention if kind == FULL else conv,
            mlp=mlp,
            attention_norm=norm,
            mlp_norm=norm,
        )
        for kind, mlp in zip(_kinds(config, sizes.num_layers), mlps, strict=True)
    )
    return ModelSpec(
        model_type=model_type,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        layers=tuple(layers),
        final_norm=norm,
        max_position=extended_context(sizes.max_position, [rope]),
        tie_embeddings=config.boolean(
            "tie_embedding" if "tie_embedding" in config else "tie_word_embeddings", default=True
        ),
    )


def _width(config: ConfigReader) -> int:
    """Of the feed-forward network, as ``Lfm2MLP`` of transformers computes it."""
    name = "block_ff_dim" if "block_ff_dim" in config else "intermediate_size"
    width = config.integer(name, maximum=2**20)
    if not config.boolean("block_auto_adjust_ff_dim", default=True):
        return width
    factor = config.number("block_ffn_dim_multiplier", minimum=1e-3, maximum=1e3, default=1.0)
    multiple = config.integer("block_multiple_of", maximum=2**20, default=256)
    width = int(factor * int(2 * width / 3))
    return round_up(width, multiple)


def _kinds(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """``FULL`` or ``CONV`` of each layer, from ``layer_types`` or the older ``full_attn_idxs``."""
    kinds = config.texts("layer_types")
    if kinds is None:
        attending = config.integers("full_attn_idxs", minimum=0)
        full = range(num_layers) if attending is None else attending
        return tuple(FULL if layer in full else CONV for layer in range(num_layers))
    unknown = sorted(set(kinds) - {FULL, CONV})
    if unknown:
        raise UnsupportedModelError(
            f"config.json lists {show(unknown[0])} in layer_types; supported are {FULL} and {CONV}."
        )
    if len(kinds) != num_layers:
        raise CorruptFileError(
            f"config.json lists {len(kinds)} layer_types for {num_layers} layers."
        )
    return kinds


_MODULES = {
    "attention_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "o": "self_attn.out_proj",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}
_CONV_MODULES = {
    "conv_in_gate": "conv.in_proj",
    "conv_out_gate": "conv.in_proj",
    "conv_value": "conv.in_proj",
    "conv_out": "conv.out_proj",
}
_PROJECTED = ("conv_in_gate", "conv_out_gate", "conv_value")  # in the order of the tensor's rows

FAMILY = Family(
    model_type="lfm2",
    build=build,
    tensors=LLAMA_TENSORS
    | {"final_norm": TensorSource(name="model.embedding_norm.weight")}
    | layer_tensors(_MODULES)
    | layer_tensors(_CONV_MODULES, bias=True)
    | {
        "layers.{i}.conv": TensorSource(name="model.layers.{i}.conv.conv.weight", squeeze=True),
        "layers.{i}.conv_bias": TensorSource(name="model.layers.{i}.conv.conv.bias"),
    },
    fused={
        f"model.layers.{{i}}.conv.in_proj.{kind}": tuple(
            f"layers.{{i}}.{name}{suffix}" for name in _PROJECTED
        )
        for kind, suffix in (("weight", ""), ("bias", "_bias"))
    },
    ignored=LLAMA_IGNORED,
)
