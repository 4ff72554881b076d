"""Qwen 3.5, dense: as Qwen3-Next, with projections of their own and one feed-forward network."""

import logging

from ridgeline.core.spec import MLPSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family, TensorSource
from ridgeline.models.fields import read_activation, read_sizes
from ridgeline.models.known_keys import refuse_unsupported
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


def build_with_vision(config: ConfigReader) -> ModelSpec:
    """The text model of a config that has a vision tower beside it."""
    _log.warning(
        "This qwen3_5 model has a vision tower, which is left out: it reads text, not images."
    )
    for name in _VISION_KEYS:
        config.ignore(name)
    text = config.section("text_config")
    refuse_unsupported(text, computed=HYBRID_KEYS)
    tied = text.boolean("tie_word_embeddings", default=False)
    config.refuse("tie_word_embeddings", unless=(tied,))
    return build(text)


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
FAMILY_WITH_VISION = Family(
    model_type="qwen3_5",
    build=build_with_vision,
    tensors={
        name: TensorSource(
            name=source.name.replace("model.", "model.language_model."), squeeze=source.squeeze
        )
        for name, source in _TENSORS.items()
    },
    fused=_FUSED,
    fused_heads=GATED_HEADS,
    ignored=(*HYBRID_IGNORED, r"(model\.)?visual\..*"),
    computes=HYBRID_KEYS,
)
