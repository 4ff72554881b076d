"""Mistral Small 4 (Mistral AI, 2026): DeepSeek's latent attention with growing queries, experts."""

from dataclasses import replace

from ridgeline.core.spec import GroupLimit, GroupScore, ModelSpec, RoutingSpec, Scoring
from ridgeline.models.config import ConfigReader
from ridgeline.models.deepseek_v2 import deepseek_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_sizes
from ridgeline.models.ministral import read_growth
from ridgeline.models.mla_config import MLA_TENSORS, read_mla
from ridgeline.models.moe_config import (
    DEEPSEEK_MOE_TENSORS,
    EXPERT_KEYS,
    STACKED_FUSED,
    STACKED_TENSORS,
    read_num_experts,
    read_top_k,
)
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """Experts by softmax; of groups the sum of the best two scores counts."""
    sizes = read_sizes(config, max_position=2**20, vocab_size=131_072)
    attention = read_mla(
        config,
        max_position=sizes.max_position,
        query_rank=1024,
        interleaved=config.boolean("rope_interleave", default=True),
        of_whole_head=True,
    )
    num_experts = read_num_experts(config, "n_routed_experts", "num_local_experts")
    num_groups = config.integer("n_group", default=1)
    limit = GroupLimit(
        num_groups=num_groups,
        top_groups=config.integer("topk_group", default=1),
        score=GroupScore.BEST_TWO,
    )
    return deepseek_decoder(
        config,
        model_type="mistral4",
        sizes=sizes,
        attention=[replace(attention, query_growth=read_growth(config, sizes.max_position))]
        * sizes.num_layers,
        num_experts=num_experts,
        routing=RoutingSpec(
            top_k=read_top_k(config, num_experts, default=4),
            scoring=Scoring.SOFTMAX,
            normalised=config.boolean("norm_topk_prob", default=True),
            scale=config.number("routed_scaling_factor", minimum=1e-6, maximum=1e6, default=1.0),
            groups=limit if num_groups > 1 else None,
        ),
        num_shared=1,
        num_dense=0,
    )


FAMILY = Family(
    model_type="mistral4",
    build=build,
    tensors=LLAMA_TENSORS | MLA_TENSORS | DEEPSEEK_MOE_TENSORS | STACKED_TENSORS,
    fused=STACKED_FUSED,
    ignored=LLAMA_IGNORED,
    computes=EXPERT_KEYS,
)
