"""GLM-4 9B (Zhipu 2024, arXiv 2406.12793): half of each head rotated, neighbours as pairs."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_heads, read_rms_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, fused_tensors

FUSED = {"model.layers.{i}.mlp.gate_up_proj.weight": ("layers.{i}.gate", "layers.{i}.up")}
GLM_TENSORS = LLAMA_TENSORS | fused_tensors(FUSED)


def build_glm(config: ConfigReader, model_type: str) -> ModelSpec:
    """``attention_bias`` is that of q, k and v."""
    sizes = read_sizes(config, max_position=131_072)
    heads = read_heads(config, sizes.hidden_size, head_dim=128)
    rope = read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position, partial=0.5)
    attention = replace(
        heads.attention(replace(rope, interleaved=True)),
        qkv_bias=config.boolean("attention_bias", default=True),
    )
    return pre_norm_decoder(
        config,
        model_type=model_type,
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        norm=read_rms_norm(config, eps=1.5625e-7),
    )


def build(config: ConfigReader) -> ModelSpec:
    """All layers are alike."""
    return build_glm(config, "glm")


FAMILY = Family(
    model_type="glm",
    build=build,
    tensors=GLM_TENSORS,
    fused=FUSED,
    ignored=LLAMA_IGNORED,
    computes=frozenset({"partial_rotary_factor"}),
)
