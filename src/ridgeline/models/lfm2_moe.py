"""LFM2 with experts (Liquid AI 2025, LFM2-8B-A1B): LFM2's layers, chosen by a corrected sigmoid."""

from dataclasses import replace

from ridgeline.core.spec import (
    Activation,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RoutingSpec,
    Scoring,
)
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import TensorSource
from ridgeline.models.fields import read_sizes
from ridgeline.models.lfm2 import FAMILY as LFM2
from ridgeline.models.lfm2 import conv_decoder
from ridgeline.models.moe_config import (
    EXPERT_KEYS,
    choose_mlps,
    ignore_training,
    read_num_experts,
    read_top_k,
    read_width,
)
from ridgeline.models.tensor_names import layer_tensors


def build(config: ConfigReader) -> ModelSpec:
    """The first ``num_dense_layers`` have a network of their own in the place of experts."""
    ignore_training(config)
    sizes = read_sizes(config, max_position=128_000, vocab_size=65_536)
    num_dense = config.integer("num_dense_layers", minimum=0, default=2)
    num_experts = read_num_experts(config, "num_experts", "num_local_experts")
    moe = MoESpec(
        num_experts=num_experts,
        width=read_width(config, "moe_intermediate_size"),
        activation=Activation.SILU,
        routing=RoutingSpec(
            top_k=read_top_k(config, num_experts, default=4),
            scoring=Scoring.SIGMOID,
            normalised=config.boolean("norm_topk_prob", default=True),
            scale=config.number("routed_scaling_factor", minimum=1e-6, maximum=1e6, default=1.0),
            correction_bias=config.boolean("use_expert_bias", default=True),
        ),
    )
    mlps = choose_mlps(
        [layer >= num_dense for layer in range(sizes.num_layers)],
        dense=MLPSpec(width=sizes.mlp_width, activation=Activation.SILU),
        moe=moe,
    )
    return conv_decoder(config, model_type="lfm2_moe", sizes=sizes, mlps=mlps)


_EXPERTS = {"experts.gate": "w1", "experts.up": "w3", "experts.down": "w2"}
FAMILY = replace(
    LFM2,
    model_type="lfm2_moe",
    build=build,
    tensors={
        **LFM2.tensors,
        **layer_tensors({"router": "feed_forward.gate"}),
        **layer_tensors({n: f"feed_forward.experts.{{e}}.{of}" for n, of in _EXPERTS.items()}),
        "layers.{i}.correction_bias": TensorSource(
            name="model.layers.{i}.feed_forward.expert_bias"
        ),
    },
    computes=EXPERT_KEYS,
)
