"""Qwen 3.5: as Qwen3-Next, with projections of their own; one feed-forward network, or experts."""

import logging
from dataclasses import replace

from ridgeline.core.spec import MLPSpec, ModelSpec, SharedExpertSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family
from ridgeline.models.fields import read_activation, read_sizes
from ridgeline.models.known_keys import refuse_unsupported
from ridgeline.models.moe_config import EXPERT_KEYS, QWEN_MOE_TENSORS, read_width
from ridgeline.models.qwen2_moe import read_qwen_moe
from ridgeline.models.qwen3_next import (
    GATED_HEADS,
    HYBRID_IGNORED,
    HYBRID_KEYS,
    HYBRID_TENSORS,
    hybrid_decoder,
)
from ridgeline.models.tensor_names import layer_tensors

_log = logging.getLogger(__name__)

_VISION_KEYS = (
    "image_token_id", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_start_token_id",
)  # fmt: skip


def build(config: ConfigReader) -> ModelSpec:
    """Layers that predict tokens ahead (MTP) are left out."""
    config.ignore("mtp_num_hidden_layers")
    config.ignore("mtp_use_dedicated_embeddings")
    sizes = read_sizes(config, max_position=32_768)
    activation = read_activation(config, "hidden_act", default="silu")
    mlp = MLPSpec(width=sizes.mlp_width, activation=activation)
    return hybrid_decoder(
        config, model_type="qwen3_5_text", sizes=sizes, mlps=[mlp] * sizes.num_layers
    )


def build_moe(config: ConfigReader) -> ModelSpec:
    """Experts in every layer, and one that all tokens share."""
    config.ignore("mtp_num_hidden_layers")
    config.ignore("mtp_use_dedicated_embeddings")
    sizes = read_sizes(config, max_position=32_768, mlp_width=0)
    shared = SharedExpertSpec(
        width=read_width(config, "shared_expert_intermediate_size"), gated_output=True
    )
    activation = read_activation(config, "hidden_act", default="silu")
    moe = read_qwen_moe(config, activation, shared=shared, normalised=True)
    return hybrid_decoder(
        config, model_type="qwen3_5_moe_text", sizes=sizes, mlps=[moe] * sizes.num_layers
    )


def build_with_vision(config: ConfigReader) -> ModelSpec:
    """The text model of a config that has a vision tower beside it."""
    model_type = config.text("model_type")
    _log.warning(
        "This %s model has a vision tower, which is left out: it reads text, not images.",
        model_type,
    )
    for name in _VISION_KEYS:
        config.ignore(name)
    text = config.section("text_config")
    refuse_unsupported(text, computed=HYBRID_KEYS | EXPERT_KEYS)
    tied = text.boolean("tie_word_embeddings", default=False)
    config.refuse("tie_word_embeddings", unless=(tied,))
    return (build_moe if model_type == "qwen3_5_moe" else build)(text)


_PROJECTIONS = {
    "delta_query": "linear_attn.in_proj_qkv",
    "delta_key": "linear_attn.in_proj_qkv",
    "delta_value": "linear_attn.in_proj_qkv",
    "delta_gate": "linear_attn.in_proj_z",
    "delta_beta": "linear_attn.in_proj_b",
    "delta_decay": "linear_attn.in_proj_a",
}
_TENSORS = HYBRID_TENSORS | layer_tensors(_PROJECTIONS)
_FUSED = {
    "model.layers.{i}.linear_attn.in_proj_qkv.weight": (
        "layers.{i}.delta_query", "layers.{i}.delta_key", "layers.{i}.delta_value",
    )
}  # fmt: skip

FAMILY = Family(
    model_type="qwen3_5_text",
    build=build,
    tensors=_TENSORS,
    fused=_FUSED,
    fused_heads=GATED_HEADS,
    ignored=HYBRID_IGNORED,
    computes=HYBRID_KEYS,
)
MOE_FAMILY = replace(
    FAMILY,
    model_type="qwen3_5_moe_text",
    build=build_moe,
    tensors=_TENSORS | QWEN_MOE_TENSORS,
    computes=HYBRID_KEYS | EXPERT_KEYS,
)


def _beside_vision(model_type: str, text: Family) -> Family:
    return replace(
        text,
        model_type=model_type,
        build=build_with_vision,
        tensors={
            name: replace(source, name=source.name.replace("model.", "model.language_model."))
            for name, source in text.tensors.items()
        },
        ignored=(*HYBRID_IGNORED, r"(model\.)?visual\..*"),
    )


FAMILY_WITH_VISION = _beside_vision("qwen3_5", FAMILY)
MOE_FAMILY_WITH_VISION = _beside_vision("qwen3_5_moe", MOE_FAMILY)
