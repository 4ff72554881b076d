"""Nemotron-4 and Minitron (NVIDIA 2024, arXiv 2402.16819): LayerNorm plus one, squared ReLU.

Jais 2 (Inception 2025) is the same with plain LayerNorms, whole heads rotated, and biases.
"""

from dataclasses import replace

from ridgeline.core.spec import ModelSpec
from ridgeline.models.arcee import squared_relu_decoder
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family
from ridgeline.models.fields import read_layer_norm
from ridgeline.models.tensor_names import LLAMA_IGNORED, LLAMA_TENSORS, NORM_BIASES


def build(config: ConfigReader) -> ModelSpec:
    """Half of each head is rotated, norms are stored minus one."""
    norm = replace(read_layer_norm(config, "norm_eps", bias=True), unit_offset=True)
    return squared_relu_decoder(
        config, model_type="nemotron", norm=norm, max_position=4096, partial=0.5
    )


def build_jais2(config: ConfigReader) -> ModelSpec:
    """Biases unless the config says that there are none."""
    config.ignore("rms_norm_eps")  # there is no such norm
    norm = read_layer_norm(config, "layer_norm_eps", bias=True)
    return squared_relu_decoder(
        config, model_type="jais2", norm=norm, max_position=8192, biased=True
    )


FAMILY = Family(
    model_type="nemotron",
    build=build,
    tensors=LLAMA_TENSORS | NORM_BIASES,
    ignored=LLAMA_IGNORED,
    computes=frozenset({"partial_rotary_factor"}),
)
JAIS_2 = replace(FAMILY, model_type="jais2", build=build_jais2, computes=frozenset())
