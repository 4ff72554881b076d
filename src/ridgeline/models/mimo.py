"""MiMo (Xiaomi 2025, arXiv 2505.07608): Qwen 2, and a layer that predicts one token more."""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec
from ridgeline.models import qwen2
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family, MTPTensors

_LAYER = "model.mtp_layers.0."


def build(config: ConfigReader) -> ModelSpec:
    """As Qwen 2."""
    return replace(qwen2.build(config), model_type="mimo")


FAMILY: Family = replace(
    qwen2.FAMILY,
    model_type="mimo",
    build=build,
    ignored=(*qwen2.FAMILY.ignored, r"model\.mtp_layers\..*"),
    mtp=MTPTensors(
        layer=_LAYER,
        token_norm=f"{_LAYER}token_layernorm.weight",
        hidden_norm=f"{_LAYER}hidden_layernorm.weight",
        fc=f"{_LAYER}input_proj.weight",
        final_norm=f"{_LAYER}final_layernorm.weight",
        features_first=True,
    ),
)
