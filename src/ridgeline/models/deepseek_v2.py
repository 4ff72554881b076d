"""DeepSeek-V2 (arXiv 2405.04434): latent attention, routed and shared experts."""

from collections.abc import Sequence

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.spec import (
    AttentionSpec,
    GroupLimit,
    GroupScore,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RoutingSpec,
    Scoring,
    SharedExpertSpec,
)
from ridgeline.models.config import ConfigReader, show
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import Sizes, read_activation, read_rms_norm, read_sizes
from ridgeline.models.mla_config import MLA_TENSORS, read_mla
from ridgeline.models.moe_config import (
    DEEPSEEK_MOE_TENSORS,
    EXPERT_KEYS,
    check_routing,
    choose_mlps,
    ignore_training,
    num_dense_layers,
    read_num_experts,
    read_top_k,
    read_width,
)
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def deepseek_decoder(
    config: ConfigReader,
    *,
    model_type: str,
    sizes: Sizes,
    attention: Sequence[AttentionSpec | MLASpec],
    num_experts: int,
    routing: RoutingSpec,
    num_shared: int,
    num_dense: int,
    eps: float = 1e-6,
) -> ModelSpec:
    """The first layers are dense, the others have experts; ``mlp_layer_types`` has priority.

    ``num_shared`` experts, which are one wide network, ``num_dense`` and ``eps`` are the family's
    defaults.
    """
    check_routing(routing, num_experts)
    ignore_training(config)
    config.refuse("moe_layer_freq", unless=(1,))
    config.refuse("mlp_bias", unless=(False,))
    activation = read_activation(config, "hidden_act", default="silu")
    width = read_width(config, "moe_intermediate_size")
    num_shared = config.integer("n_shared_experts", minimum=0, maximum=2**10, default=num_shared)
    num_dense = config.integer("first_k_dense_replace", minimum=0, default=num_dense)
    if "mlp_layer_types" in config:
        num_dense = num_dense_layers(config, sizes.num_layers)
    mlps = choose_mlps(
        [layer >= num_dense for layer in range(sizes.num_layers)],
        dense=MLPSpec(width=sizes.mlp_width, activation=activation),
        moe=MoESpec(
            num_experts=num_experts,
            width=width,
            activation=activation,
            routing=routing,
            shared=SharedExpertSpec(width=width * num_shared) if num_shared else None,
        ),
    )
    return pre_norm_decoder(
        config,
        model_type=model_type,
        sizes=sizes,
        attention=attention,
        mlps=mlps,
        norm=read_rms_norm(config, eps=eps),
    )


def _groups(config: ConfigReader) -> GroupLimit | None:
    method = config.text("topk_method", default="greedy")
    if method == "group_limited_greedy":
        num_groups, top_groups = config.integer("n_group"), config.integer("topk_group")
        if num_groups == 1:
            return None
        return GroupLimit(num_groups=num_groups, top_groups=top_groups, score=GroupScore.BEST)
    if method != "greedy":
        raise UnsupportedModelError(
            f"config.json sets topk_method to {show(method)}; supported for deepseek_v2 are greedy "
            "and group_limited_greedy."
        )
    for name in ("n_group", "topk_group"):
        config.ignore(name)
    return None


def build(config: ConfigReader) -> ModelSpec:
    """``norm_topk_prob`` is refused: DeepSeek's code and transformers disagree about it."""
    config.refuse("scoring_func", unless=("softmax",))
    config.refuse("norm_topk_prob", unless=(False,))
    sizes = read_sizes(config, max_position=2048, vocab_size=102_400)
    num_experts = read_num_experts(config, "n_routed_experts", "num_experts")
    routing = RoutingSpec(
        top_k=read_top_k(config, num_experts),
        scoring=Scoring.SOFTMAX,
        normalised=False,
        scale=config.number("routed_scaling_factor", minimum=1e-6, maximum=1e6, default=1.0),
        groups=_groups(config),
    )
    attention = read_mla(config, max_position=sizes.max_position, query_rank=1536, interleaved=True)
    return deepseek_decoder(
        config,
        model_type="deepseek_v2",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        num_experts=num_experts,
        routing=routing,
        num_shared=2,
        num_dense=0,
    )


FAMILY = Family(
    model_type="deepseek_v2",
    build=build,
    tensors=LLAMA_TENSORS | MLA_TENSORS | DEEPSEEK_MOE_TENSORS,
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS,
)
