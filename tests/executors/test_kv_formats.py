"""K and V in 8 and 4 bits: what they lose, on which executors, and which models they refuse."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.tiny import CONFIG, LATENT, SINKS, Driver, tiny_executor, tiny_model

from ridgeline.core.arrays import Array
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.plan import ModelRole, Outputs
from ridgeline.executors import create_executor
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.reference.executor import ReferenceExecutor
from ridgeline.kernels.reference import kv_codes

FORMATS = ("int8", "fp8", "int4")
WIDE = CONFIG | {"head_dim": 64, "num_attention_heads": 4}
PROMPT = [(7 * i + i * i) % 151 for i in range(120)]


def logits(model: ExecutorModel, make, kv: str) -> np.ndarray:
    executor = tiny_executor(
        model=model,
        block_tokens=16,
        num_blocks=16,
        make=lambda models, size: make(models, size, kv_cache_dtype=kv),
    )
    driver = Driver(executor, blocks_per_slot=8)
    segment = driver.segment(0, 0, PROMPT, fresh=True, outputs=Outputs(logits=True))
    result = driver.run(segment, admissions=(driver.admit(0, PROMPT),)).passes[0][0].logits
    executor.close()
    return np.array(result, dtype=np.float64)


def divergence(exact: np.ndarray, found: np.ndarray) -> float:
    """Mean KL of the softmax of ``found`` from that of ``exact``."""
    log_p, log_q = (torch.from_numpy(each).log_softmax(-1) for each in (exact, found))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize("kv", FORMATS)
def test_cpu_stores_what_the_reference_does(kv):
    """Beside it, queries as bytes cost what int8 does; what is stored is the same."""
    model = tiny_model(WIDE, dtype="float32", gain=2.0)
    exact = logits(model, ReferenceExecutor, "auto")
    reference, native = (logits(model, make, kv) for make in (ReferenceExecutor, CPUExecutor))
    lost = divergence(exact, reference)
    assert lost > 0
    assert divergence(reference, native) < max(0.1 * lost, 5e-4)


@pytest.mark.parametrize("kv", FORMATS)
def test_codes(kv):
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 2, 64)))
    values[1, 0], values[2, 1, 3], values[3, 0, 7] = 0, torch.nan, torch.inf
    stored = kv_codes.encode(kv, values)
    assert stored.shape == (5, 2, kv_codes.code_bytes(kv, 64))
    read = kv_codes.decode(kv, stored, torch.float64)
    assert torch.equal(read[1, 0], torch.zeros(64, dtype=torch.float64))
    assert read.isnan().all(-1).nonzero().tolist() == [[2, 1], [3, 0]]
    error = (read - values)[[0, 4]].pow(2).mean().sqrt()
    assert error < {"int8": 0.01, "fp8": 0.03, "int4": 0.12}[kv]


def test_rotation_spreads_outliers(monkeypatch):
    """Some elements of K are twenty times as large as others, as real models have them."""
    model = tiny_model(WIDE, dtype="float32", gain=2.0)
    weights = dict(model.weights.items())
    for name in [name for name in weights if name.endswith((".k", ".q"))]:
        weights[name] = planted(weights[name], 20 if name.endswith("k") else 1 / 20)
    model = replace(model, weights=weights)
    exact = logits(model, ReferenceExecutor, "auto")
    rotated = divergence(exact, logits(model, ReferenceExecutor, "int4"))
    native = divergence(exact, logits(model, CPUExecutor, "int4"))
    monkeypatch.setattr(kv_codes, "rotate_heads", lambda values: values)
    plain = divergence(exact, logits(model, ReferenceExecutor, "int4"))
    assert max(rotated, native) <= 0.5 * plain


def planted(weight_OI: Array, factor: float) -> Array:
    """Elements 3 and 35 of each head, which rotary embeddings turn together, times a factor."""
    heads = np.array(weight_OI, copy=True).reshape(-1, 64, weight_OI.shape[1])
    heads[:, [3, 35]] *= factor
    return heads.reshape(weight_OI.shape)


@pytest.mark.parametrize("executor", ["cpu", "reference"])
@pytest.mark.parametrize(("config", "reason"), [(LATENT, "latents"), (CONFIG, "have 8: use int8")])
def test_int4_refuses_heads_that_are_not_rotated(executor, config, reason):
    settings = EngineConfig(executor=executor, block_tokens=16, kv_cache_dtype="int4")
    with pytest.raises(SettingsError, match=reason):
        create_executor({ModelRole.TARGET: tiny_model(config, dtype="float32")}, settings)


def test_models_with_sinks_are_warned(caplog):
    settings = EngineConfig(executor="cpu", block_tokens=16, kv_cache_dtype="fp8_e4m3")
    with caplog.at_level(logging.WARNING):
        create_executor({ModelRole.TARGET: tiny_model(SINKS, dtype="float32")}, settings).close()
    assert "75 of 100 places" in caplog.text
