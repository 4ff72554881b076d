"""ERNIE 4.5 with experts (Baidu, 2025): softmax scores, corrected for the choice alone."""

from ridgeline.core.spec import (
    MLPSpec,
    ModelSpec,
    MoESpec,
    RoutingSpec,
    Scoring,
    SharedExpertSpec,
)
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.ernie4_5 import ernie_attention
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import read_activation, read_heads, read_rms_norm, read_sizes
from ridgeline.models.moe_config import (
    DEEPSEEK_MOE_TENSORS,
    EXPERT_KEYS,
    choose_mlps,
    ignore_training,
    read_num_experts,
    read_width,
)
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def _with_experts(config: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers have experts: each ``moe_layer_interval``-th from the start index to the end."""
    start = config.integer("moe_layer_start_index", minimum=0, default=1)
    end = config.integer("moe_layer_end_index", minimum=-1, default=-1)
    interval = config.integer("moe_layer_interval", default=1)
    last = num_layers - 1 if end == -1 else end
    return [start <= layer <= last and (layer + 1) % interval == 0 for layer in range(num_layers)]


def build(config: ConfigReader) -> ModelSpec:
    """``moe_norm_min`` bounds a sum of scores from below that no real one comes near."""
    config.refuse("use_bias", unless=(False,))
    for name in ("moe_norm_min", "moe_capacity", "moe_use_aux_free", "moe_gate"):
        config.ignore(name)
    ignore_training(config)
    sizes = read_sizes(config, max_position=131_072, vocab_size=103_424)
    heads = read_heads(config, sizes.hidden_size)
    activation = read_activation(config, "hidden_act", default="silu")
    num_experts = read_num_experts(config, "moe_num_experts", "num_local_experts")
    width = read_width(config, "moe_intermediate_size")
    num_shared = config.integer("moe_num_shared_experts", minimum=0, maximum=2**10, default=2)
    moe = MoESpec(
        num_experts=num_experts,
        width=width,
        activation=activation,
        routing=RoutingSpec(
            top_k=config.integer("moe_k", maximum=num_experts, default=6),
            scoring=Scoring.SOFTMAX,
            normalised=True,
            correction_bias=True,
        ),
        shared=SharedExpertSpec(width=width * num_shared) if num_shared else None,
    )
    return pre_norm_decoder(
        config,
        model_type="ernie4_5_moe",
        sizes=sizes,
        attention=[ernie_attention(config, sizes, heads, bias=False)] * sizes.num_layers,
        mlps=choose_mlps(
            _with_experts(config, sizes.num_layers),
            dense=MLPSpec(width=sizes.mlp_width, activation=activation),
            moe=moe,
        ),
        norm=read_rms_norm(config, eps=1e-5),
        tied=True,
    )


_CORRECTION = "model.layers.{i}.mlp.moe_statics.e_score_correction_bias"
FAMILY = Family(
    model_type="ernie4_5_moe",
    build=build,
    tensors=LLAMA_TENSORS
    | DEEPSEEK_MOE_TENSORS
    | {"layers.{i}.correction_bias": TensorSource(name=_CORRECTION, row_vector=True)},
    ignored=(*LLAMA_IGNORED, r"model\.mtp_.*"),  # of the extra prediction layer
    computes=EXPERT_KEYS,
)
