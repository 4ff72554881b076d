"""GLM-4-0414 (Zhipu, 2025): GLM-4 9B with norms behind each branch as well."""

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import with_post_norms
from ridgeline.models.family import Family
from ridgeline.models.glm import FUSED, GLM_TENSORS, build_glm
from ridgeline.models.tensor_names import LLAMA_IGNORED, layer_tensors


def build(config: ConfigReader) -> ModelSpec:
    """Four norms a layer."""
    return with_post_norms(build_glm(config, "glm4"))


FAMILY = Family(
    model_type="glm4",
    build=build,
    tensors=GLM_TENSORS
    | layer_tensors(
        {
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        }
    ),
    fused=FUSED,
    ignored=LLAMA_IGNORED,
    computes=frozenset({"partial_rotary_factor"}),
)
