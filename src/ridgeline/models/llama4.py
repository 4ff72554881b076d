"""Llama 4, its text models (Meta 2025, Scout and Maverick): attention in chunks with rotary
positions, and in every fourth layer without either; experts whose inputs are scaled.
"""

from dataclasses import replace

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.rope_spec import QueryGrowth
from ridgeline.core.spec import (
    AttentionSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RoutingSpec,
    Scoring,
    SharedExpertSpec,
)
from ridgeline.models.config import ConfigReader, show
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import (
    FULL,
    Sizes,
    read_activation,
    read_heads,
    read_rms_norm,
    read_sizes,
)
from ridgeline.models.moe_config import (
    EXPERT_KEYS,
    choose_mlps,
    ignore_training,
    read_num_experts,
    read_top_k,
    read_width,
)
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, fused_tensors, layer_tensors

_CHUNKED = "chunked_attention"
_EPS = 1e-5


def build(config: ConfigReader) -> ModelSpec:
    """Layers with experts are ``moe_layers``, or each ``interleave_moe_layer_step``-th."""
    ignore_training(config)
    config.ignore("for_llm_compressor")
    sizes = read_sizes(config, max_position=131_072, vocab_size=202_048)
    experts = read_num_experts(config, "num_local_experts")
    activation = read_activation(config, "hidden_act", default="silu")
    moe = MoESpec(
        num_experts=experts,
        width=sizes.mlp_width,
        activation=activation,
        routing=RoutingSpec(
            top_k=read_top_k(config, experts, default=1),
            scoring=Scoring.SIGMOID,
            normalised=False,
            scales_inputs=True,
        ),
        shared=SharedExpertSpec(width=sizes.mlp_width),
    )
    dense = MLPSpec(width=read_width(config, "intermediate_size_mlp"), activation=activation)
    step = config.integer("interleave_moe_layer_step", default=1)
    listed = config.integers("moe_layers", minimum=0)
    sparse = set(range(step - 1, sizes.num_layers, step) if listed is None else listed)
    mlps = choose_mlps([layer in sparse for layer in range(sizes.num_layers)], dense=dense, moe=moe)
    return pre_norm_decoder(
        config,
        model_type="llama4_text",
        sizes=sizes,
        attention=_attention(config, sizes),
        mlps=mlps,
        norm=read_rms_norm(config, eps=_EPS),
    )


def _attention(config: ConfigReader, sizes: Sizes) -> list[AttentionSpec]:
    """Layers without rotary positions may have queries that grow instead."""
    heads = read_heads(config, sizes.hidden_size, head_dim=128)
    rope = read_rope(
        config, head_dim=heads.head_dim, max_position=sizes.max_position, theta=500_000.0
    )
    bias = config.boolean("attention_bias", default=False)
    rms = replace(read_rms_norm(config, eps=_EPS), gain=False)
    norm = rms if config.boolean("use_qk_norm", default=True) else None
    growth = _growth(config)
    rotated = replace(
        heads.attention(replace(rope, interleaved=True)),
        qk_norm=norm,
        qkv_bias=bias,
        out_bias=bias,
    )
    plain = replace(heads.attention(None), query_growth=growth, qkv_bias=bias, out_bias=bias)
    turning = _rotated_layers(config, sizes.num_layers)
    default = [_CHUNKED if turns else FULL for turns in turning]
    size = config.optional_integer("attention_chunk_size", default=8192)
    return [
        replace(rotated if turns else plain, window=window, chunked=window is not None)
        for turns, window in zip(turning, _chunks(config, default, size), strict=True)
    ]


def _growth(config: ConfigReader) -> QueryGrowth | None:
    """``attn_temperature_tuning`` is a number in the first configs, whose value nobody reads."""
    tuned = config.raw("attn_temperature_tuning")
    if not isinstance(tuned, bool | int | None):
        raise CorruptFileError(
            f"config.json must give attn_temperature_tuning as true or false, and it is "
            f"{show(tuned)}."
        )
    rate = config.number("attn_scale", minimum=0.0, maximum=1e3, default=0.1)
    length = config.integer("floor_scale", maximum=2**30, default=8192)
    is_tuned = tuned is None or bool(tuned)
    return QueryGrowth(rate=rate, length=length, offset=1) if is_tuned and rate else None


def _rotated_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Those of ``no_rope_layers`` that are 1; all but each ``no_rope_layer_interval``-th."""
    every = config.integer("no_rope_layer_interval", default=4)
    listed = config.integers("no_rope_layers", minimum=0)
    if not listed:
        return [layer % every != 0 for layer in range(1, num_layers + 1)]
    if len(listed) < num_layers:
        raise CorruptFileError(
            f"config.json lists {len(listed)} no_rope_layers for {num_layers} layers."
        )
    return [value != 0 for value in listed[:num_layers]]


def _chunks(config: ConfigReader, default: list[str], size: int | None) -> list[int | None]:
    """The length of each layer's chunks, by ``layer_types``."""
    kinds = config.texts("layer_types") or tuple(default)
    unknown = sorted(set(kinds) - {_CHUNKED, FULL})
    if unknown:
        raise UnsupportedModelError(
            f"config.json lists {show(unknown[0])} in layer_types; supported are {FULL} and "
            f"{_CHUNKED}."
        )
    if len(kinds) != len(default):
        raise CorruptFileError(
            f"config.json lists {len(kinds)} layer_types for {len(default)} layers."
        )
    if size is None and _CHUNKED in kinds:
        raise UnsupportedModelError(
            f"config.json has layers of {_CHUNKED}, but gives them no attention_chunk_size."
        )
    return [size if kind == _CHUNKED else None for kind in kinds]


_EXPERTS = "model.layers.{i}.feed_forward.experts"
_GATE_UP = {f"{_EXPERTS}.gate_up_proj": ("layers.{i}.experts.gate", "layers.{i}.experts.up")}
_STACKED = fused_tensors(_GATE_UP) | {
    "layers.{i}.experts.down": TensorSource(name=f"{_EXPERTS}.down_proj")
}
_MODULES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
FAMILY = Family(
    model_type="llama4_text",
    build=build,
    tensors=LLAMA_TENSORS
    | layer_tensors(
        {
            "router": "feed_forward.router",
            **{name: f"feed_forward.{module}" for name, module in _MODULES.items()},
            **{
                f"shared.{name}": f"feed_forward.shared_expert.{module}"
                for name, module in _MODULES.items()
            },
        }
    )
    | {name: replace(source, transpose=True) for name, source in _STACKED.items()},
    fused=_GATE_UP,
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS,
)
