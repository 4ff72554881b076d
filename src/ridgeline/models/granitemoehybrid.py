"""Granite 4 (IBM, 2025): Mamba-2 and attention by turns, with experts or without."""

from dataclasses import replace

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.spec import (
    AttentionSpec,
    Mamba2Spec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    SharedExpertSpec,
)
from ridgeline.models.config import ConfigReader, show
from ridgeline.models.family import Family
from ridgeline.models.fields import FULL, read_activation, read_rms_norm
from ridgeline.models.granite import MULTIPLIERS
from ridgeline.models.granite import build as build_dense
from ridgeline.models.granitemoe import FAMILY as GRANITE_MOE
from ridgeline.models.granitemoe import read_experts
from ridgeline.models.mamba_config import (
    BAMBA_KEYS,
    LINEAR,
    mamba2_fused,
    mamba2_tensors,
    read_hybrid_kinds,
    read_mamba2,
)
from ridgeline.models.moe_config import EXPERT_KEYS, read_width
from ridgeline.models.tensor_names import layer_tensors


def build(config: ConfigReader) -> ModelSpec:
    """Without experts the network that all tokens share is the only one."""
    spec = build_dense(config)
    attention = spec.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    if not _has_positions(config):
        attention = replace(attention, rope=None)
    kinds = read_hybrid_kinds(config, len(spec.layers), LINEAR)
    mixers: dict[str, AttentionSpec | Mamba2Spec] = {
        FULL: attention,
        LINEAR: read_mamba2(
            config, BAMBA_KEYS, hidden_size=spec.hidden_size, norm=read_rms_norm(config)
        ),
    }
    mlp = _feed_forward(config)
    layers = tuple(
        replace(layer, attention=mixers[kind], mlp=mlp)
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, model_type="granitemoehybrid", layers=layers)


def _feed_forward(config: ConfigReader) -> MLPSpec | MoESpec:
    width = read_width(config, "shared_intermediate_size")
    if config.integer("num_local_experts", minimum=0, maximum=2**14, default=8):
        return replace(read_experts(config), shared=SharedExpertSpec(width=width))
    for name in ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"):
        config.ignore(name)
    return MLPSpec(width=width, activation=read_activation(config, "hidden_act", default="silu"))


def _has_positions(config: ConfigReader) -> bool:
    kind = config.raw("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise UnsupportedModelError(
            f"config.json sets position_embedding_type to {show(kind)}; supported are rope "
            "and nope."
        )
    return kind == "rope"


_INPUT = "model.layers.{i}.shared_mlp.input_linear.weight"
FAMILY = Family(
    model_type="granitemoehybrid",
    build=build,
    tensors={**GRANITE_MOE.tensors}
    | mamba2_tensors("mamba")
    | layer_tensors(
        {
            "gate": "shared_mlp.input_linear",
            "up": "shared_mlp.input_linear",
            "down": "shared_mlp.output_linear",
        }
    ),
    fused={
        **GRANITE_MOE.fused,
        **mamba2_fused("mamba"),
        # A layer has the first two or the last two.
        _INPUT: (
            "layers.{i}.shared.gate", "layers.{i}.shared.up", "layers.{i}.gate", "layers.{i}.up"
        ),
    },
    ignored=GRANITE_MOE.ignored,
    computes=EXPERT_KEYS | MULTIPLIERS,
)  # fmt: skip
