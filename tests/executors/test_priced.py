"""What is priced is what the executors store: bytes of weights and of KV blocks."""

import pytest
import torch
from tests.tiny import CONFIG, EXPERTS, tiny_model

from ridgeline.core.plan import ModelRole
from ridgeline.executors import create_executor
from ridgeline.executors.priced import priced_model
from ridgeline.kernels.cpu import native_kernels_run
from ridgeline.roofline.memory import kv_bytes_per_token, weights_bytes

LARGE = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@pytest.mark.skipif(not native_kernels_run(), reason="the native kernels are not built")
@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int4-g128"])
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_weights(config, dtype, quantization):
    model = tiny_model(config | LARGE, dtype=dtype)
    made = create_executor(
        "cpu", {ModelRole.TARGET: model}, block_tokens=16, quantization=quantization
    )
    priced = priced_model(model, "cpu", quantization=quantization)
    assert weights_bytes(priced) == pytest.approx(made.weights_bytes(), rel=0.01)
    made.close()


@pytest.mark.skipif(not native_kernels_run(), reason="the native kernels are not built")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float32", "bfloat16", "int8"])
def test_cpu_kv(kv_cache_dtype):
    model = tiny_model(CONFIG | LARGE, dtype=torch.bfloat16)
    made = create_executor(
        "cpu", {ModelRole.TARGET: model}, block_tokens=16, kv_cache_dtype=kv_cache_dtype
    )
    priced = priced_model(model, "cpu", kv_cache_dtype=kv_cache_dtype)
    per_token = sum(made.kv_layout().block_bytes) / 16
    assert kv_bytes_per_token(priced) == pytest.approx(per_token, rel=0.001)
    made.close()
