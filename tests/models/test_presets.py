"""Preset shapes have the published number of parameters."""

import math

import pytest

from ridgeline.core.weight_uses import op_weights
from ridgeline.models import PRESETS, describe, lower

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini": 3_821_079_552,
    "phi-4-mini": 3_836_021_760,
    "phi-2": 2_779_683_840,
    "olmo-2-7b": 7_298_617_344,
    "gpt2": 124_439_808,
    "smollm2-135m": 134_515_008,
    "smollm3-3b": 3_075_098_624,
    "gemma-2b": 2_506_172_416,
    "starcoder2-3b": 3_030_371_328,
    "lfm2-1.2b": 1_170_340_608,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name):
    definition = describe(PRESETS[name], strict=True)
    weights = {
        weight.name: weight.shape for op in lower(definition.spec) for weight in op_weights(op)
    }
    assert sum(math.prod(shape) for shape in weights.values()) == PUBLISHED[name]
    assert weights.keys() <= definition.sources.keys()
