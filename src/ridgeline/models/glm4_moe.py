"""GLM-4.5, 4.6 and 4.7 (Zhipu 2025, arXiv 2508.06471): DeepSeek-V3's experts, grouped queries."""

from dataclasses import replace

from ridgeline.core.spec import AttentionSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.deepseek_v2 import deepseek_decoder
from ridgeline.models.deepseek_v3 import SIGMOID_MOE_TENSORS, read_sigmoid_routing
from ridgeline.models.family import Family
from ridgeline.models.fields import Sizes, read_heads, read_rms_norm, read_sizes
from ridgeline.models.moe_config import EXPERT_KEYS, read_num_experts, read_width
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS


def build(config: ConfigReader) -> ModelSpec:
    """Half of each head is rotated; ``attention_bias`` is that of q, k and v."""
    sizes = read_sizes(config, max_position=131_072)
    heads = read_heads(config, sizes.hidden_size)
    rope = read_rope(config, head_dim=heads.head_dim, max_position=sizes.max_position, partial=0.5)
    has_norm = config.boolean("use_qk_norm", default=False)
    attention = replace(
        heads.attention(rope), qk_norm=read_rms_norm(config, eps=1e-5) if has_norm else None
    )
    return _decoder(config, sizes, attention, model_type="glm4_moe", num_dense=1)


def build_solar(config: ConfigReader) -> ModelSpec:
    """Solar Open (Upstage 2025): experts in every layer, heads rotated as a whole."""
    config.refuse("use_qk_norm", unless=(False,))
    config.ignore("intermediate_size")  # there are no dense layers
    width = read_width(config, "moe_intermediate_size")
    sizes = read_sizes(config, max_position=131_072, vocab_size=196_608, mlp_width=width)
    heads = read_heads(config, sizes.hidden_size, head_dim=128)
    rope = read_rope(
        config,
        head_dim=heads.head_dim,
        max_position=sizes.max_position,
        theta=1_000_000.0,
        partial=1.0,
    )
    return _decoder(config, sizes, heads.attention(rope), model_type="solar_open", num_dense=0)


def _decoder(
    config: ConfigReader,
    sizes: Sizes,
    attention: AttentionSpec,
    *,
    model_type: str,
    num_dense: int,
) -> ModelSpec:
    attention = replace(attention, qkv_bias=config.boolean("attention_bias", default=False))
    num_experts = read_num_experts(config, "n_routed_experts", "num_local_experts")
    return deepseek_decoder(
        config,
        model_type=model_type,
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        num_experts=num_experts,
        routing=read_sigmoid_routing(config, num_experts),
        num_shared=1,
        num_dense=num_dense,
        eps=1e-5,
    )


FAMILY = Family(
    model_type="glm4_moe",
    build=build,
    tensors=LLAMA_TENSORS | SIGMOID_MOE_TENSORS,
    ignored=(*LLAMA_IGNORED, r"model\.layers\.(46|92)\..*"),  # predict one more token
    computes=EXPERT_KEYS | {"partial_rotary_factor"},
)
SOLAR_OPEN = replace(FAMILY, model_type="solar_open", build=build_solar, ignored=LLAMA_IGNORED)
