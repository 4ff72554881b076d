"""Memory arithmetic against counts made another way."""

from dataclasses import replace

import pytest
from tests.parity.encoder_cases import ENCODER_CASES
from tests.tiny import CONFIG, LATENT, WINDOWED, tiny_executor, tiny_model

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.formats import BFLOAT16, FLOAT64, number_format
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.weight_uses import op_weights
from ridgeline.models import PRESETS, describe, lower
from ridgeline.roofline import PricedModel
from ridgeline.roofline.memory import (
    fit,
    kv_bytes,
    kv_bytes_per_token,
    rank_pool_bytes,
    rank_weights_bytes,
    weights_bytes,
)


def preset(name, **changes):
    spec = describe(dict(PRESETS[name])).spec
    return PricedModel(spec=spec, ops=lower(spec), activations=BFLOAT16, **changes)


@pytest.mark.parametrize("config", [CONFIG, WINDOWED, LATENT])
def test_bytes_are_those_of_the_tensors(config):
    model = tiny_model(config, dtype="float64")
    priced = PricedModel(spec=model.spec, ops=model.ops, activations=FLOAT64)
    assert weights_bytes(priced) == sum(value.nbytes for value in model.weights.values())
    layout = tiny_executor(model=model, block_tokens=8).kv_layout()
    assert kv_bytes_per_token(priced) == sum(layout.block_bytes) / 8


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.6),
        ("llama-2-7b", 6.74),
        ("qwen2.5-0.5b", 0.494),
        ("gemma-2-2b", 2.61),
        ("gpt2", 0.124),
        ("deepseek-v3", 671),
    ],
)
def test_parameters_as_published(name, billions):
    assert weights_bytes(preset(name)) / 2e9 == pytest.approx(billions, rel=0.01)


def test_llama_70b_kv_is_the_formulas():
    model = preset("llama-3.1-70b")
    assert kv_bytes(model, 4096) == 2 * 80 * 8 * 128 * 2 * 4096
    quantized = replace(model, kv=number_format("int8"))
    assert kv_bytes(quantized, 1) == 80 * 8 * 2 * (128 + 2)


def test_windows_cap_the_cache():
    model = preset("mistral-7b")
    assert kv_bytes(model, 8192) == kv_bytes(model, 4096)
    gemma = preset("gemma-3-1b")
    assert kv_bytes(gemma, 32_768) < kv_bytes_per_token(gemma) * 32_768 / 4


def test_a_window_of_a_tenth_takes_a_tenth_and_pools_an_eighth_at_most():
    model = preset("mistral-7b")
    spec = model.spec

    def behind(window):
        layers = tuple(
            replace(layer, attention=replace(layer.attention, window=window))
            for layer in spec.layers
        )
        return replace(model, spec=replace(spec, layers=layers))

    assert kv_bytes(behind(None), 10_240) == 10 * kv_bytes(behind(1024), 10_240)
    whole, windowed = (rank_pool_bytes(behind(w), 10_240, block_tokens=16) for w in (None, 1024))
    assert whole / windowed > 8.7


def test_pools_hold_whole_blocks_and_the_steps_in_flight():
    model = preset("mistral-7b")
    assert rank_pool_bytes(model, 1001, block_tokens=16) == kv_bytes(model, 1008)
    behind = kv_bytes_per_token(model) * (4096 + 4096 // 8 + 16)
    assert rank_pool_bytes(model, 8192, block_tokens=16) == behind


def test_ranks_share_the_weights():
    whole = preset("llama-3.1-70b")
    split = replace(whole, layout=ParallelLayout(tensor=8))
    assert rank_weights_bytes(split) == pytest.approx(weights_bytes(whole) / 8, rel=0.01)
    asked = {"memory_bytes": 80e9, "context": 4096, "block_tokens": 16}
    assert not fit(whole, **asked).fits
    eight = fit(split, **asked)
    pool = 8 * (0.9 * 80e9) - weights_bytes(whole)
    assert eight.max_batch == pytest.approx(pool / kv_bytes(whole, 4096), rel=0.01)
    assert eight.max_context == whole.spec.max_position


def test_what_fits_exactly_fits_and_a_byte_less_is_a_block_less():
    model = preset("llama-3.2-1b")
    room = rank_weights_bytes(model) + rank_pool_bytes(model, 112, block_tokens=16)

    def fitting(memory_bytes):
        found = fit(model, memory_bytes=memory_bytes, context=100, block_tokens=16, kv_share=1.0)
        return found.max_batch, found.max_context

    assert fitting(room) == (1, 112)
    assert fitting(room - 1) == (0, 96)


def test_kv_has_what_weights_and_a_tenth_or_a_steps_activations_leave():
    """Of a token the residual stream, before and after, and a gate's, up's and down's outputs."""
    model = preset("llama-3.2-1b")
    asked = {"memory_bytes": 80e9, "context": 1000, "block_tokens": 16}
    found = fit(model, **asked)
    assert found.fits and found.weights_bytes == rank_weights_bytes(model)
    assert found.kv_pool_bytes == 0.9 * 80e9 - found.weights_bytes
    large = fit(model, **asked, step_tokens=1 << 20)
    active = 2 * (1 << 20) * (2 * 2048 + 2 * 8192 + 2048) + 4 * 128_256
    assert large.activation_bytes == active
    assert large.kv_pool_bytes == 80e9 - active - large.weights_bytes
    for share in (None, 0.5):
        none = fit(model, **asked | {"memory_bytes": 1e9}, kv_share=share)
        assert not none.fits
        assert none.kv_pool_bytes == none.max_batch == none.max_context == 0


def test_a_model_without_a_cache_does_not_fill_memory():
    spec = describe(ENCODER_CASES[0].hf_config.to_dict()).spec
    with pytest.raises(UnsupportedModelError, match="no KV cache"):
        fit(PricedModel(spec=spec, ops=lower(spec)), memory_bytes=1e9, context=9, block_tokens=16)


def test_every_rank_has_routers_and_latents():
    whole = preset("deepseek-v3")
    everywhere = {
        weight.name: whole.bytes_of(weight)
        for op in whole.ops
        for weight in op_weights(op)
        if len(weight.shape) < 2 or weight.name.endswith((".router", ".q_a", ".kv_a"))
    }
    split = replace(whole, layout=ParallelLayout(tensor=8))
    more = 8 * rank_weights_bytes(split) - weights_bytes(whole)
    assert more == pytest.approx(7 * sum(everywhere.values()), rel=1e-6)
