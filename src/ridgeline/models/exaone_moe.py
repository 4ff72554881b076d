"""K-EXAONE (LG AI Research 2026): EXAONE 4's attention behind norms, DeepSeek-V3's experts."""

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.deepseek_v2 import deepseek_decoder
from ridgeline.models.deepseek_v3 import SIGMOID_MOE_TENSORS, read_sigmoid_routing
from ridgeline.models.exaone4 import exaone_attention
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import read_sizes
from ridgeline.models.moe_config import EXPERT_KEYS, read_num_experts
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """The first layers are dense, the others have experts."""
    sizes = read_sizes(config, max_position=2048)
    num_experts = read_num_experts(config, "num_experts", "num_local_experts")
    return deepseek_decoder(
        config,
        model_type="exaone_moe",
        sizes=sizes,
        attention=exaone_attention(config, sizes),
        num_experts=num_experts,
        routing=read_sigmoid_routing(config, num_experts, scale=2.5),
        num_shared=config.integer("num_shared_experts", minimum=0, maximum=2**10, default=1),
        num_dense=1,
        eps=1e-5,
    )


_CORRECTION = "model.layers.{i}.mlp.gate.e_score_correction_bias"
FAMILY = Family(
    model_type="exaone_moe",
    build=build,
    tensors=LLAMA_TENSORS
    | SIGMOID_MOE_TENSORS
    | {
        "layers.{i}.correction_bias": TensorSource(
            name=_CORRECTION, other_names=(_CORRECTION.replace(".gate.", "."),)
        )
    },
    ignored=(*LLAMA_IGNORED, r"mtp\..*"),  # predicts one more token
    computes=EXPERT_KEYS,
)
