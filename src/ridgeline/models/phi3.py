"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): fused projections, LongRoPE, partial rotation."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.decoder import pre_norm_decoder
from ridgeline.models.family import Family
from ridgeline.models.fields import read_heads, read_rms_norm, read_sizes
from ridgeline.models.rope_config import read_rope
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, fused_tensors

_ORIGINAL_LENGTH = 4096
_FUSED = {
    "model.layers.{i}.self_attn.qkv_proj.weight": ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v"),
    "model.layers.{i}.mlp.gate_up_proj.weight": ("layers.{i}.gate", "layers.{i}.up"),
}


def build(config: ConfigReader) -> ModelSpec:
    """As Llama; in the long versions max_position_embeddings has the scaling counted in."""
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.refuse(name, unless=(False,))
    for name in ("full_attn_mod", "interpolate_factor"):  # of Phi-4-mini
        config.refuse(name, unless=(1,))
    sizes = read_sizes(config, max_position=4096)
    heads = read_heads(config, sizes.hidden_size)
    rope = read_rope(
        config,
        head_dim=heads.head_dim,
        max_position=sizes.max_position,
        partial=1.0,
        original=_ORIGINAL_LENGTH,
    )
    # Read where there is no scaling, too: it has no effect then.
    config.ignore("original_max_position_embeddings")
    attention = replace(
        heads.attention(rope),
        window=config.optional_integer("sliding_window", default=None),
    )
    return pre_norm_decoder(
        config,
        model_type="phi3",
        sizes=sizes,
        attention=[attention] * sizes.num_layers,
        norm=read_rms_norm(config, eps=1e-5),
    )


FAMILY = Family(
    model_type="phi3",
    build=build,
    tensors=LLAMA_TENSORS | fused_tensors(_FUSED),
    fused=_FUSED,
    ignored=LLAMA_IGNORED,
    computes=frozenset({"partial_rotary_factor"}),
)
