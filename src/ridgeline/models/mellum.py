"""Mellum 2 (JetBrains, 2026): Qwen 3's experts and heads, windows with rotary positions apart."""

from dataclasses import replace

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.spec import MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import (
    FULL,
    SLIDING,
    layer_windows,
    read_activation,
    read_heads,
    read_layer_kinds,
    read_rms_norm,
    read_sizes,
)
from ridgeline.models.moe_config import EXPERT_KEYS, QWEN_MOE_TENSORS, choose_mlps
from ridgeline.models.qwen2_moe import read_qwen_moe
from ridgeline.models.rope_config import read_nested_ropes
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS

_THETAS = {FULL: 500_000.0, SLIDING: 10_000.0}
_PREDICTS_MORE = ("mtp_layer_types", "mtp_mlp_layer_types", "num_mtp_layers",
                  "num_nextn_predict_layers")  # fmt: skip


def build(config: ConfigReader) -> ModelSpec:
    """Any layer may have experts and any a window; rotary positions are those of its kind."""
    for name in _PREDICTS_MORE:
        config.ignore(name)
    sizes = read_sizes(config, max_position=131_072, vocab_size=98_304)
    heads = read_heads(config, sizes.hidden_size, head_dim=128)
    ropes = read_nested_ropes(
        config, head_dim=heads.head_dim, max_position=sizes.max_position, thetas=_THETAS
    )
    kinds = read_layer_kinds(config, sizes.num_layers, [FULL] * sizes.num_layers)
    windows = layer_windows(kinds, config.optional_integer("sliding_window", default=1024))
    bias = config.boolean("attention_bias", default=False)
    norm = read_rms_norm(config)
    activation = read_activation(config, "hidden_act", default="silu")
    networks = config.texts("mlp_layer_types") or ("sparse",) * sizes.num_layers
    if len(networks) != sizes.num_layers or not {"sparse"} <= {*networks} <= {"sparse", "dense"}:
        raise UnsupportedModelError(
            f"config.json gives mlp_layer_types that are not {sizes.num_layers} of sparse and "
            "dense, or none sparse."
        )
    return pre_norm_decoder(
        config,
        model_type="mellum",
        sizes=sizes,
        attention=[
            replace(
                heads.attention(ropes[kind]),
                window=window,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=norm,
            )
            for kind, window in zip(kinds, windows, strict=True)
        ],
        mlps=choose_mlps(
            [network == "sparse" for network in networks],
            dense=MLPSpec(width=sizes.mlp_width, activation=activation),
            moe=read_qwen_moe(config, activation, shared=None, normalised=True),
        ),
    )


FAMILY = Family(
    model_type="mellum",
    build=build,
    tensors=LLAMA_TENSORS | QWEN_MOE_TENSORS,
    ignored=(*LLAMA_IGNORED, r"mtp\..*"),
    computes=EXPERT_KEYS,
)
