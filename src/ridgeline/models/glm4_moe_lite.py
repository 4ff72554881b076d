"""GLM-4.7-Flash (Zhipu, 2026): DeepSeek-V3 with other sizes and defaults."""

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.deepseek_v2 import deepseek_decoder
from ridgeline.models.deepseek_v3 import SIGMOID_MOE_TENSORS, read_sigmoid_routing
from ridgeline.models.family import Family
from ridgeline.models.fields import read_sizes
from ridgeline.models.mla_config import MLA_TENSORS, read_mla
from ridgeline.models.moe_config import EXPERT_KEYS, read_num_experts
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """Neighbours are rotated against each other, unless ``rope_interleave`` is false."""
    sizes = read_sizes(config, max_position=202_752, vocab_size=154_880)
    num_experts = read_num_experts(config, "n_routed_experts", "num_local_experts")
    attention = read_mla(
        config,
        max_position=sizes.max_position,
        query_rank=768,
        interleaved=config.boolean("rope_interleave", default=True),
    )
    return deepseek_decoder(
        config,
        model_type="glm4_moe_lite",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        num_experts=num_experts,
        routing=read_sigmoid_routing(config, num_experts, top_k=4, scale=1.8),
        num_shared=1,
        num_dense=1,
        eps=1e-5,
    )


FAMILY = Family(
    model_type="glm4_moe_lite",
    build=build,
    tensors=LLAMA_TENSORS | MLA_TENSORS | SIGMOID_MOE_TENSORS,
    ignored=(*LLAMA_IGNORED, r"model\.layers\.47\..*"),  # predict one more token
    computes=EXPERT_KEYS,
)
