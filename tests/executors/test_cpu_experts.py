"""Experts that the native kernels say that they read."""

import pytest
from tests.tiny import EXPERTS, LATENT, Driver, tiny_executor, tiny_model

from ridgeline.core.config import EngineConfig
from ridgeline.core.plan import Pass
from ridgeline.executors import create_executor

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33]


@pytest.mark.parametrize("config", [EXPERTS, LATENT], ids=["every layer", "not the first"])
def test_experts_read_are_those_of_the_reference(config):
    """Of a prompt, of single steps, and of steps that are replayed without returning."""
    read = []
    for name in ("reference", "cpu"):
        executor = tiny_executor(
            model=tiny_model(config, dtype="float32"),
            block_tokens=16,
            make=lambda models, size, name=name: create_executor(
                models, EngineConfig(executor=name, block_tokens=size)
            ),
        )
        driver, results = Driver(executor), []
        first = driver.segment(0, 0, PROMPT[:3], fresh=True)
        results.append(driver.run(first, admissions=(driver.admit(0, PROMPT),)))
        for start in range(3, 6):
            results.append(driver.run(driver.segment(0, start, PROMPT[start : start + 1])))
        passes = [Pass(segments=(driver.segment(0, 6, [PROMPT[6]]),), num_steps=4)]
        results.append(driver.run(passes=passes))
        read.append([result.experts_read for result in results])
        executor.close()
    assert read[0] == read[1]
    assert all(count > 0 for count in read[0])
