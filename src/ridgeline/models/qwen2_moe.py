"""Qwen 1.5 and 2 with experts (arXiv 2407.10671, §2.2.2): a shared expert with a gate."""

from dataclasses import replace

from ridgeline.core.spec import (
    Activation,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RoutingSpec,
    Scoring,
    SharedExpertSpec,
)
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
    read_sizes,
)
from ridgeline.models.moe_config import (
    EXPERT_KEYS,
    QWEN_MOE_TENSORS,
    choose_mlps,
    ignore_training,
    read_num_experts,
    read_top_k,
    read_width,
    sparse_layers,
)
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def read_qwen_moe(
    config: ConfigReader,
    activation: Activation,
    *,
    shared: SharedExpertSpec | None,
    normalised: bool = False,
) -> MoESpec:
    """The experts of Qwen 2 and 3; ``normalised`` is the default of ``norm_topk_prob``."""
    ignore_training(config)
    num_experts = read_num_experts(config, "num_experts", "num_local_experts")
    return MoESpec(
        num_experts=num_experts,
        width=read_width(config, "moe_intermediate_size"),
        activation=activation,
        routing=RoutingSpec(
            top_k=read_top_k(config, num_experts),
            scoring=Scoring.SOFTMAX,
            normalised=config.boolean("norm_topk_prob", default=normalised),
        ),
        shared=shared,
    )


def _windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: none, or by turns in the first ``max_window_layers``.

    As transformers has it; no published checkpoint has windows.
    """
    uses_window = config.boolean("use_sliding_window", default=False)
    first_full = config.integer("max_window_layers", minimum=0, default=28)
    default = [
        SLIDING if uses_window and layer < first_full and layer % 2 == 0 else FULL
        for layer in range(num_layers)
    ]
    kinds = read_layer_kinds(config, num_layers, default)
    if uses_window:
        return layer_windows(kinds, config.optional_integer("sliding_window", default=4096))
    config.ignore("sliding_window")
    return layer_windows(kinds, None)


def build(config: ConfigReader) -> ModelSpec:
    """Attention as in Qwen 2; layers without experts have the feed-forward network of Llama."""
    sizes = read_sizes(config, max_position=32_768)
    heads = read_heads(config, sizes.hidden_size)
    rope = read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position)
    bias = config.boolean("qkv_bias", default=True)
    attention = (
        replace(
            heads.attention(rope),
            window=window,
            qkv_bias=bias,
        )
        for window in _windows(config, sizes.num_layers)
    )
    activation = read_activation(config, "hidden_act", default="silu")
    shared = SharedExpertSpec(
        width=read_width(config, "shared_expert_intermediate_size"), gated_output=True
    )
    mlps = choose_mlps(
        sparse_layers(config, sizes.num_layers),
        dense=MLPSpec(width=sizes.mlp_width, activation=activation),
        moe=read_qwen_moe(config, activation, shared=shared),
    )
    return pre_norm_decoder(
        config, model_type="qwen2_moe", sizes=sizes, attention=attention, mlps=mlps
    )


FAMILY = Family(
    model_type="qwen2_moe",
    build=build,
    tensors=LLAMA_TENSORS | QWEN_MOE_TENSORS,
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS,
)
