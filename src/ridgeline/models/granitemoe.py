"""Granite 3 with experts (IBM, 2024), and with a shared expert beside them."""

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.core.spec import ModelSpec, MoESpec, RoutingSpec, Scoring, SharedExpertSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import read_activation
from ridgeline.models.granite import MULTIPLIERS
from ridgeline.models.granite import build as build_dense
from ridgeline.models.moe_config import (
    EXPERT_KEYS,
    ignore_training,
    read_num_experts,
    read_top_k,
    read_width,
)
from ridgeline.models.tensor_names import (
    LLAMA_IGNORED,
    LLAMA_TENSORS,
    fused_tensors,
    layer_tensors,
)


def build(config: ConfigReader) -> ModelSpec:
    """Softmax over the chosen experts' logits, as if all had been normalised."""
    shared = config.integer("shared_intermediate_size", minimum=0, maximum=2**22, default=0)
    moe = replace(read_experts(config), shared=SharedExpertSpec(width=shared) if shared else None)
    spec = build_dense(config)
    layers = tuple(replace(layer, mlp=moe) for layer in spec.layers)
    return replace(spec, model_type=config.text("model_type"), layers=layers)


def read_experts(config: ConfigReader) -> MoESpec:
    """The experts, without one that is shared."""
    ignore_training(config)
    num_experts = read_num_experts(config, "num_local_experts", "num_experts")
    return MoESpec(
        num_experts=num_experts,
        width=read_width(config, "intermediate_size"),
        activation=read_activation(config, "hidden_act", default="silu"),
        routing=RoutingSpec(
            top_k=read_top_k(config, num_experts, default=2),
            scoring=Scoring.SOFTMAX,
            normalised=True,
        ),
    )


_EXPERTS = "model.layers.{i}.block_sparse_moe"
_SHARED = "model.layers.{i}.shared_mlp"
_FUSED: Mapping[str, tuple[str, ...]] = {
    f"{_EXPERTS}.input_linear.weight": ("layers.{i}.experts.gate", "layers.{i}.experts.up"),
    f"{_SHARED}.input_linear.weight": ("layers.{i}.shared.gate", "layers.{i}.shared.up"),
}
FAMILY = Family(
    model_type="granitemoe",
    build=build,
    tensors=LLAMA_TENSORS
    | fused_tensors(_FUSED)
    | layer_tensors({"router": "block_sparse_moe.router.layer"})
    | {
        "layers.{i}.experts.down": TensorSource(name=f"{_EXPERTS}.output_linear.weight"),
        "layers.{i}.shared.down": TensorSource(name=f"{_SHARED}.output_linear.weight"),
    },
    fused=_FUSED,
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS | MULTIPLIERS,
)
WITH_SHARED_EXPERT = replace(FAMILY, model_type="granitemoeshared")
