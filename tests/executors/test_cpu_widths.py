"""Layers of different widths in one model, whose rows share the program's buffers."""

from dataclasses import replace

import numpy as np
import pytest
from tests.tiny import CONFIG, Driver, tiny_executor

from ridgeline.core.config import EngineConfig
from ridgeline.core.plan import Outputs
from ridgeline.executors import create_executor
from ridgeline.executors.model import ExecutorModel
from ridgeline.models import describe, lower
from ridgeline.weights import dummy_weights

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33]


def model() -> ExecutorModel:
    """Three layers of 6, 2 and 4 heads, over 2, 1 and 2 heads of K and V."""
    spec = describe(CONFIG).spec
    layers = []
    for layer, (heads, kv_heads) in zip(spec.layers, [(6, 2), (2, 1), (4, 2)], strict=True):
        attention = replace(layer.attention, num_heads=heads, num_kv_heads=kv_heads)
        layers.append(replace(layer, attention=attention))
    spec = replace(spec, layers=tuple(layers))
    ops = lower(spec)
    weights = dummy_weights(ops, dtype="float32", seed=3)
    return ExecutorModel(spec=spec, ops=ops, weights=weights, dtype="float32")


@pytest.mark.parametrize("count", [1, len(PROMPT)])
def test_narrow_layers_equal_the_reference(count):
    logits = []
    for name in ("reference", "cpu"):
        executor = tiny_executor(
            model=model(),
            block_tokens=16,
            make=lambda models, size, name=name: create_executor(
                models, EngineConfig(executor=name, block_tokens=size)
            ),
        )
        outputs = Outputs(sample=True, logits=True)
        logits.append(Driver(executor).start(0, PROMPT[:count], outputs=outputs).logits)
        executor.close()
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-4 * np.abs(logits[0]).max())
