"""Experts that the native kernels say that they read, and the tokens that went to each."""

import pytest
from tests.tiny import EXPERTS, LATENT, Driver, tiny_executor, tiny_model

from ridgeline.core.config import EngineConfig
from ridgeline.core.ops import MoE
from ridgeline.core.plan import Pass
from ridgeline.executors import create_executor
from ridgeline.executors.cpu import native_ops

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


def _tokens(executor):
    """Of a prompt and four replayed steps."""
    driver = Driver(executor)
    first = driver.segment(0, 0, PROMPT, fresh=True)
    driver.run(first, admissions=(driver.admit(0, PROMPT),))
    driver.run(passes=[Pass(segments=(driver.segment(0, 13, [7]),), num_steps=4)])
    return {router: counts.tolist() for router, counts in executor.expert_tokens().items()}


@pytest.mark.parametrize("without", [(), (MoE,)], ids=["native", "fallback"])
def test_tokens_of_each_expert_are_those_of_the_reference(monkeypatch, without):
    kept = tuple(k for k in native_ops._NATIVE if k not in without)
    monkeypatch.setattr(native_ops, "_NATIVE", kept)
    found = []
    for name in ("reference", "cpu"):
        executor = tiny_executor(
            model=tiny_model(EXPERTS, dtype="float32"),
            block_tokens=16,
            make=lambda models, size, name=name: create_executor(
                models, EngineConfig(executor=name, block_tokens=size)
            ),
        )
        found.append(_tokens(executor))
        executor.close()
    assert found[0] == found[1]
    (top_k,) = {op.routing.top_k for op in tiny_model(EXPERTS).ops if isinstance(op, MoE)}
    assert [sum(counts) for counts in found[0].values()] == [17 * top_k] * len(found[0])
