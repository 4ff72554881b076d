"""Ops without a native kernel are the reference's, between native ones, and are said."""

from dataclasses import replace

import numpy as np
import pytest
from tests.tiny import (
    CHUNKED,
    CONFIG,
    EXPERTS,
    GROWING,
    LATENT,
    SINKS,
    STREAMS,
    Driver,
    tiny_executor,
    tiny_model,
)

from ridgeline.core import ops
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import number_format
from ridgeline.core.plan import Outputs, Pass
from ridgeline.executors import create_executor
from ridgeline.executors.cpu import native_ops
from ridgeline.weights import LoRAWeights

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33]
NORMED = CONFIG | {"model_type": "qwen3", "head_dim": 8}
SHARED = LATENT | {"n_shared_experts": 1}
LAYER_INPUTS = {name: value for name, value in CONFIG.items() if name != "rope_theta"} | {
    "model_type": "gemma4_text",
    "head_dim": 8,
    "global_head_dim": 12,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 151,
}
BESIDE = LAYER_INPUTS | {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
XIELU = CONFIG | {"model_type": "apertus", "hidden_act": "xielu"}
CASES = [
    (CONFIG, ops.Embed),
    (CONFIG, ops.Norm),
    (CONFIG, ops.QKVProject),
    (NORMED, ops.HeadNorm),
    (SINKS, ops.Rope),
    (GROWING, ops.GrowQueries),
    (LATENT, ops.LatentProject),
    (LATENT, ops.Rope),
    (CONFIG, ops.OutProject),
    (CONFIG, ops.MLP),
    (EXPERTS, ops.MoE),
    (SHARED, ops.SharedExpert),
    (SHARED, ops.AddShared),
    (LAYER_INPUTS, ops.HeadNorm),
    (LAYER_INPUTS, ops.LayerEmbed),
    (LAYER_INPUTS, ops.LayerInput),
    (LAYER_INPUTS, ops.ScaleHidden),
    (BESIDE, ops.MoE),
    (CHUNKED, ops.GrowQueries),
    (CHUNKED, ops.HeadNorm),
    (CHUNKED, ops.MoE),
    (STREAMS, ops.SplitStreams),
    (STREAMS, ops.PredictStreams),
    (STREAMS, ops.CorrectStreams),
    (STREAMS, ops.AddToStreams),
    (STREAMS, ops.JoinStreams),
    (STREAMS, ops.AddLaurel),
    (STREAMS, ops.SparseGateUp),
    (XIELU, ops.GateUp),
    (XIELU, ops.Xielu),
    (XIELU, ops.Down),
    (CONFIG, ops.AddResidual),
]


def without(monkeypatch, *kinds):
    """As if no kernel had been written for these ops."""
    kept = tuple(k for k in native_ops._NATIVE if k not in kinds)
    monkeypatch.setattr(native_ops, "_NATIVE", kept)


def cpu_executor(config, **fields):
    model = tiny_model(config, dtype="float32")
    return tiny_executor(
        model=replace(model, **fields),
        block_tokens=16,
        make=lambda models, size: create_executor(
            models, EngineConfig(executor="cpu", block_tokens=size)
        ),
    )


def logits_and_tokens(config, **fields):
    """Of a prompt beside another, and of decode steps, single and replayed; experts read."""
    executor = cpu_executor(config, **fields)
    driver = Driver(executor, blocks_per_slot=4)
    wants = Outputs(sample=True, logits=True)
    result = driver.run(
        driver.segment(0, 0, PROMPT, fresh=True, outputs=wants),
        driver.segment(1, 0, PROMPT[5:], fresh=True, outputs=wants),
        admissions=(
            driver.admit(0, PROMPT, adapter=len(fields.get("adapters", ()))),
            driver.admit(1, PROMPT[5:]),
        ),
    )
    logits = np.concatenate([part.logits for part in result.passes[0]])
    token = result.passes[0][0].token_ids[0]
    step = Pass(segments=(driver.segment(0, len(PROMPT), [token]),), num_steps=5)
    replayed = driver.run(passes=[step])
    executor.close()
    return logits, (token, *replayed.passes[0][0].token_ids), result.experts_read


@pytest.mark.parametrize(
    ("config", "kind"), CASES, ids=[f"{c['model_type']}-{k.__name__}" for c, k in CASES]
)
def test_the_fallback_of_an_op_computes_what_its_kernel_does(monkeypatch, caplog, config, kind):
    expected, tokens, read = logits_and_tokens(config)
    assert not caplog.records
    without(monkeypatch, kind)
    found, other_tokens, other_read = logits_and_tokens(config)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    assert other_tokens == tokens
    assert other_read == read
    (record,) = caplog.records
    assert kind.__name__ in record.message


def test_all_ops_with_a_fallback_at_once(monkeypatch):
    expected, tokens, _ = logits_and_tokens(CONFIG)
    without(monkeypatch, *(kind for config, kind in CASES if config is CONFIG))
    found, other_tokens, _ = logits_and_tokens(CONFIG)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    assert other_tokens == tokens


def test_weights_of_fallbacks_are_as_precise_as_the_checkpoint(monkeypatch):
    """Only what kernels multiply is quantized."""
    expected, _, _ = logits_and_tokens(CONFIG)
    quantized, _, _ = logits_and_tokens(CONFIG, quantization=number_format("int4"))
    without(monkeypatch, ops.QKVProject, ops.OutProject, ops.MLP)
    found, _, _ = logits_and_tokens(CONFIG, quantization=number_format("int4"))
    assert np.abs(found - expected).mean() < 0.7 * np.abs(quantized - expected).mean()


def test_adapters_change_fallbacks(monkeypatch):
    model = tiny_model(CONFIG)
    name = next(op.down.name for op in model.ops if isinstance(op, ops.MLP))
    rng = np.random.default_rng(1)
    lora = LoRAWeights(
        down=rng.standard_normal((2, CONFIG["intermediate_size"]), dtype=np.float32),
        up=rng.standard_normal((CONFIG["hidden_size"], 2), dtype=np.float32),
    )
    plain, _, _ = logits_and_tokens(CONFIG)
    expected, tokens, _ = logits_and_tokens(CONFIG, adapters=({name: lora},))
    assert np.abs(expected - plain)[: len(PROMPT)].max() > 0.1
    without(monkeypatch, ops.MLP)
    found, other_tokens, _ = logits_and_tokens(CONFIG, adapters=({name: lora},))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)
    assert other_tokens == tokens


@pytest.mark.parametrize("kind", [ops.Attend, ops.KVWrite, ops.Head])
def test_ops_on_the_kv_cache_have_no_fallback(monkeypatch, kind):
    without(monkeypatch, kind)
    with pytest.raises(SettingsError, match=f"no kernel for {kind.__name__}"):
        cpu_executor(CONFIG)
