"""What is priced is what the executors store: bytes of weights and of KV blocks."""

from dataclasses import replace

import pytest
from tests.tiny import CONFIG, EXPERTS, tiny_model

from ridgeline.core.config import EngineConfig
from ridgeline.core.formats import BFLOAT16, on_load_format
from ridgeline.core.plan import ModelRole
from ridgeline.core.weight_uses import op_weights
from ridgeline.executors import create_executor
from ridgeline.executors.cpu.pricing import priced as priced_as_cpu
from ridgeline.executors.cpu.roles import packed_bytes
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.priced import priced_model
from ridgeline.kernels.cpu.pool import shared_pool
from ridgeline.models import PRESETS, describe, lower
from ridgeline.roofline import PricedModel
from ridgeline.roofline.memory import kv_bytes_per_token, weights_bytes
from ridgeline.weights import DummyWeights

LARGE = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int4-g128", "int3", "int2"])
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_weights(config, dtype, quantization):
    form = on_load_format(quantization)
    model = replace(tiny_model(config | LARGE, dtype=dtype), quantization=form)
    made = create_executor({ModelRole.TARGET: model}, EngineConfig(executor="cpu", block_tokens=16))
    priced = priced_model(model, "cpu")
    # Of matrices with a scale for all 32 columns half a cache line is empty.
    assert weights_bytes(priced) == pytest.approx(made.weights_bytes(), rel=0.015)
    held = made.weight_formats()
    assert {name: priced.weight_formats[name] for name in held} == held
    assert bool(held) == (quantization is not None)
    made.close()


NARROW = LARGE | {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}


@pytest.mark.parametrize("name", ["int4", "int3", "int2"])
def test_codes_have_no_factors_where_columns_would_be_padded_to_more(name):
    form = on_load_format(name)
    model = replace(tiny_model(CONFIG | NARROW, dtype="float32"), quantization=form)
    made = create_executor({ModelRole.TARGET: model}, EngineConfig(executor="cpu", block_tokens=16))
    priced = priced_model(model, "cpu")
    assert weights_bytes(priced) == pytest.approx(made.weights_bytes(), rel=0.01)
    held = made.weight_formats()
    by_columns = {
        weight.shape[-1]: held[weight.name].name
        for op in model.ops
        for weight in op_weights(op)
        if weight.name in held and held[weight.name].bits == form.bits
    }
    assert by_columns == {576: f"{name}-g32", 512: name}
    made.close()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    "quantization", [None, "int8", "int4", "int4-g64", "int4-g128", "int3", "int2"]
)
def test_cpu_prices_are_what_packing_allocates(name, quantization):
    """Narrow matrices and wide ones, columns padded or not; nothing is packed for it."""
    spec = describe(dict(PRESETS[name])).spec
    ops, form = lower(spec), on_load_format(quantization)
    priced = priced_as_cpu(PricedModel(spec=spec, ops=ops, activations=BFLOAT16, weights=form))
    allocated = packed_bytes(shared_pool(), ops, "bfloat16", form)
    # Scales fill whole cache lines: of an odd number of groups, half a line is empty.
    assert weights_bytes(priced) == pytest.approx(allocated, rel=4e-3)


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int4-g128", "int3", "int2"])
@pytest.mark.parametrize("tied", [True, False])
def test_bits_per_weight(quantization, tied):
    spec = describe(CONFIG | LARGE | {"tie_word_embeddings": tied}).spec
    ops, dtype = lower(spec), "bfloat16"
    weights = DummyWeights(ops=ops, dtype=dtype, seed=0)
    form = on_load_format(quantization)
    model = ExecutorModel(spec=spec, ops=ops, weights=weights, dtype=dtype, quantization=form)
    made = create_executor({ModelRole.TARGET: model}, EngineConfig(executor="cpu", block_tokens=16))
    held = made.weight_formats()
    # The scales of a whole row fill half a cache line, and the other half is empty.
    factored = {"int4": 4.375, "int3": 3.375, "int2": 2.375}
    wanted = ({None: 16, "int8": 8 + 2 * 16 / 512, "int4-g128": 4.125} | factored)[quantization]
    layers = 3 * (512 * 512 * 2 + 512 * 128 * 2 + 3 * 512 * 512)
    head = {None: 16, "int8": wanted}.get(quantization, 6.5)
    bits = (layers * wanted + 512 * 512 * head) / (layers + 512 * 512)
    assert made.bits_per_weight() == pytest.approx(bits, rel=1e-3)
    if quantization not in (None, "int8"):
        assert held["embed" if tied else "head"].name == "int6"
        assert tied or held["embed"].name == "int8"
    made.close()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float32", "bfloat16", "int8", "int4", "fp8"])
def test_cpu_kv(kv_cache_dtype):
    model = tiny_model(CONFIG | LARGE, dtype="bfloat16")
    made = create_executor(
        {ModelRole.TARGET: model},
        EngineConfig(executor="cpu", block_tokens=16, kv_cache_dtype=kv_cache_dtype),
    )
    priced = priced_model(model, "cpu", kv_cache_dtype=kv_cache_dtype)
    per_token = sum(made.kv_layout().block_bytes) / 16
    assert kv_bytes_per_token(priced) == pytest.approx(per_token, rel=0.001)
    made.close()
