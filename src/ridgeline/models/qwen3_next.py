"""Qwen3-Next: three layers of the gated delta rule to one of gated attention; experts.

transformers' ``Qwen3NextForCausalLM`` says the same; extra layers that predict tokens ahead (MTP)
are left out.
"""

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.spec import (
    Activation,
    GatedDeltaSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormKind,
    NormSpec,
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
    QWEN_MOE_TENSORS,
    choose_mlps,
    read_width,
    sparse_layers,
)
from ridgeline.models.qwen2_moe import read_qwen_moe
from ridgeline.models.rope_config import read_rope, rope_section
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, layer_tensors

LINEAR = "linear_attention"
MAX_KEY_DIM = 256  # of a head, as the kernels have it
_MAX_CONV_LENGTH = 16
_MAX_HEADS = 2**12

HYBRID_KEYS = frozenset({"attn_output_gate", "partial_rotary_factor"})
HYBRID_IGNORED = (*LLAMA_IGNORED, r"(model\.)?mtp\..*")


def build(config: ConfigReader) -> ModelSpec:
    """Layers without experts have the feed-forward network of Llama."""
    sizes = read_sizes(config, max_position=32_768)
    activation = read_activation(config, "hidden_act", default="silu")
    shared = SharedExpertSpec(
        width=read_width(config, "shared_expert_intermediate_size"), gated_output=True
    )
    mlps = choose_mlps(
        sparse_layers(config, sizes.num_layers),
        dense=MLPSpec(width=sizes.mlp_width, activation=activation),
        moe=read_qwen_moe(config, activation, shared=shared, normalised=True),
    )
    return hybrid_decoder(config, model_type="qwen3_next", sizes=sizes, mlps=mlps)


def hybrid_decoder(
    config: ConfigReader, *, model_type: str, sizes: Sizes, mlps: Sequence[MLPSpec | MoESpec]
) -> ModelSpec:
    """Gated attention in some layers, the gated delta rule in the others, and these networks."""
    config.refuse("attn_output_gate", unless=(True,))
    for name in ("mrope_section", "mrope_interleaved"):
        rope_section(config).ignore(name)  # all three positions of a text's token are the same
    heads = read_heads(config, sizes.hidden_size, head_dim=256)
    bias = config.boolean("attention_bias", default=False)
    attention = replace(
        heads.attention(
            read_rope(
                config, head_dim=heads.head_dim, max_position=sizes.max_position, partial=0.25
            )
        ),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=read_rms_norm(config, unit_offset=True),
        output_gate=True,
    )
    delta = _read_delta(config)
    return pre_norm_decoder(
        config,
        model_type=model_type,
        sizes=sizes,
        attention=(attention if kind == FULL else delta for kind in _kinds(config, sizes)),
        mlps=mlps,
        norm=read_rms_norm(config, unit_offset=True),
    )


def _read_delta(config: ConfigReader) -> GatedDeltaSpec:
    if read_activation(config, "hidden_act", default="silu") is not Activation.SILU:
        raise UnsupportedModelError(
            "config.json sets hidden_act to another activation than silu, which the convolution "
            "before the gated delta rule has no kernel for."
        )
    spec = GatedDeltaSpec(
        num_key_heads=config.integer("linear_num_key_heads", maximum=_MAX_HEADS, default=16),
        num_value_heads=config.integer("linear_num_value_heads", maximum=_MAX_HEADS, default=32),
        key_dim=config.integer("linear_key_head_dim", maximum=MAX_KEY_DIM, default=128),
        value_dim=config.integer("linear_value_head_dim", maximum=2**12, default=128),
        conv_length=config.integer(
            "linear_conv_kernel_dim", minimum=2, maximum=_MAX_CONV_LENGTH, default=4
        ),
        norm=NormSpec(kind=NormKind.RMS, eps=read_rms_norm(config).eps),
    )
    if spec.num_value_heads % spec.num_key_heads:
        raise CorruptFileError(
            f"config.json gives linear_num_value_heads as {spec.num_value_heads}, which is no "
            f"multiple of linear_num_key_heads, {spec.num_key_heads}."
        )
    return spec


def _kinds(config: ConfigReader, sizes: Sizes) -> tuple[str, ...]:
    """``FULL`` or ``LINEAR`` of each layer, from ``layer_types`` or ``full_attention_interval``."""
    interval = config.integer("full_attention_interval", default=4)
    kinds = config.texts("layer_types")
    if kinds is None:
        return tuple(
            LINEAR if (layer + 1) % interval else FULL for layer in range(sizes.num_layers)
        )
    unknown = sorted(set(kinds) - {FULL, LINEAR})
    if unknown:
        raise UnsupportedModelError(
            f"config.json lists {show(unknown[0])} in layer_types; supported are {FULL} and "
            f"{LINEAR}."
        )
    if len(kinds) != sizes.num_layers:
        raise CorruptFileError(
            f"config.json lists {len(kinds)} layer_types for {sizes.num_layers} layers."
        )
    return kinds


_DELTA = "model.layers.{i}.linear_attn"
HYBRID_TENSORS = {
    **LLAMA_TENSORS,
    **layer_tensors({"gate_heads": "self_attn.q_proj"}, bias=True),
    **layer_tensors({"delta_norm": "linear_attn.norm", "delta_out": "linear_attn.out_proj"}),
    "layers.{i}.delta_conv": TensorSource(name=f"{_DELTA}.conv1d.weight", squeeze=True),
    "layers.{i}.delta_decay_log": TensorSource(name=f"{_DELTA}.A_log"),
    "layers.{i}.delta_decay_bias": TensorSource(name=f"{_DELTA}.dt_bias"),
}
# Of each head its query, and then its gate.
GATED_HEADS = {
    f"model.layers.{{i}}.self_attn.q_proj.{kind}": (
        f"layers.{{i}}.q{suffix}", f"layers.{{i}}.gate_heads{suffix}"
    )
    for kind, suffix in (("weight", ""), ("bias", "_bias"))
}  # fmt: skip
_FUSED = {
    f"{_DELTA}.in_proj_qkvz.weight": (
        "layers.{i}.delta_query", "layers.{i}.delta_key", "layers.{i}.delta_value",
        "layers.{i}.delta_gate",
    ),
    f"{_DELTA}.in_proj_ba.weight": ("layers.{i}.delta_beta", "layers.{i}.delta_decay"),
}  # fmt: skip

FAMILY = Family(
    model_type="qwen3_next",
    build=build,
    tensors=HYBRID_TENSORS
    | QWEN_MOE_TENSORS
    | {name: TensorSource(name=tensor) for tensor, names in _FUSED.items() for name in names},
    fused_heads=GATED_HEADS | _FUSED,
    ignored=HYBRID_IGNORED,
    computes=HYBRID_KEYS | EXPERT_KEYS,
)
