"""DeepSeek-V3 and R1 (arXiv 2412.19437): experts chosen by corrected sigmoid scores.

``kimi_k2`` (Moonshot AI 2025, arXiv 2507.20534) is the same with other sizes.
"""

from dataclasses import replace

from ridgeline.core.spec import GroupLimit, GroupScore, ModelSpec, RoutingSpec, Scoring
from ridgeline.models.config import ConfigReader
from ridgeline.models.deepseek_v2 import deepseek_decoder
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import read_sizes
from ridgeline.models.mla_config import MLA_TENSORS, read_mla
from ridgeline.models.moe_config import (
    DEEPSEEK_MOE_TENSORS,
    EXPERT_KEYS,
    read_num_experts,
    read_top_k,
)
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS

# The layer after the last predicts one more token; it is a drafter's, not the model's.
_EXTRA_LAYER = r"model\.layers\.61\..*"


def read_sigmoid_routing(
    config: ConfigReader,
    num_experts: int,
    *,
    top_k: int | None = 8,
    num_groups: int = 1,
    top_groups: int = 1,
    normalised: bool = True,
    scale: float = 1.0,
) -> RoutingSpec:
    """Groups of experts are ranked by the sum of their best two corrected scores.

    The arguments are the family's defaults.
    """
    config.refuse("scoring_func", unless=("sigmoid", "noaux_tc"))  # the second is dots.llm1's word
    config.refuse("topk_method", unless=("noaux_tc",))
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        config.ignore(name)
    num_groups = config.integer("n_group", default=num_groups)
    top_groups = config.integer("topk_group", default=top_groups)
    return RoutingSpec(
        top_k=read_top_k(config, num_experts, default=top_k),
        scoring=Scoring.SIGMOID,
        normalised=config.boolean("norm_topk_prob", default=normalised),
        scale=config.number("routed_scaling_factor", minimum=1e-6, maximum=1e6, default=scale),
        groups=GroupLimit(num_groups=num_groups, top_groups=top_groups, score=GroupScore.BEST_TWO)
        if num_groups > 1
        else None,
        correction_bias=True,
    )


def build(
    config: ConfigReader, *, num_groups: int = 8, top_groups: int = 4, query_rank: int = 1536
) -> ModelSpec:
    """All layers attend alike. Numbers are the defaults of a family's configuration."""
    sizes = read_sizes(config, max_position=4096, vocab_size=129_280)
    num_experts = read_num_experts(config, "n_routed_experts", "num_local_experts")
    attention = read_mla(
        config,
        max_position=sizes.max_position,
        query_rank=query_rank,
        interleaved=config.boolean("rope_interleave", default=True),
    )
    return deepseek_decoder(
        config,
        model_type="deepseek_v3",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        num_experts=num_experts,
        routing=read_sigmoid_routing(
            config, num_experts, num_groups=num_groups, top_groups=top_groups, scale=2.5
        ),
        num_shared=1,
        num_dense=3,
    )


SIGMOID_MOE_TENSORS = DEEPSEEK_MOE_TENSORS | {
    "layers.{i}.correction_bias": TensorSource(
        name="model.layers.{i}.mlp.gate.e_score_correction_bias"
    )
}
FAMILY = Family(
    model_type="deepseek_v3",
    build=build,
    tensors=LLAMA_TENSORS | MLA_TENSORS | SIGMOID_MOE_TENSORS,
    ignored=(*LLAMA_IGNORED, _EXTRA_LAYER),
    computes=EXPERT_KEYS,
)
KIMI_K2 = replace(FAMILY, model_type="kimi_k2")
