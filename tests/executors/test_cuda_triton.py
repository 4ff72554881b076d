"""The executor with the Triton kernels, interpreted, against the reference: minutes, so slow."""

import dataclasses

import pytest
import torch
from benchmarks.gpu import checks
from tests.executors.host_cuda import RecordsLaunches

from ridgeline.executors.cuda.triton_kernels import TritonKernels
from ridgeline.kernels.gpu import missing_for_gpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_for_gpu() is None, reason="a GPU has checks of its own"),
]

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
EXPERTS = {"num_local_experts": 3}
LATENTS = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
}
OTHERS = {
    "window": {"sliding_window": 8},
    "experts": EXPERTS,
    "all experts": EXPERTS | {"num_experts_per_tok": 3},
    "sinks": EXPERTS | {"sliding_window": 8},
    "latents": LATENTS | {"n_group": 2, "topk_group": 1},
    "all latent experts": LATENTS | {"num_experts_per_tok": 4},
}


def error_of(monkeypatch, case):
    config = dict(checks._MODELS[case.model]) | SMALL | OTHERS.get(case.model, {})
    if "latent" in case.model:
        del config["head_dim"]
    monkeypatch.setitem(checks._MODELS, case.model, config)
    monkeypatch.setattr(checks, "_PROMPT", tuple((37 * i + 11) % 61 for i in range(21)))
    monkeypatch.setattr(checks, "_STEPS", 3)
    device = RecordsLaunches()
    error = checks._error(case, device, TritonKernels(torch.device("cpu")), "graphs")
    assert device.num_replays > 0
    return error


@pytest.mark.parametrize("model", checks._MODELS)
def test_every_kind_of_model(monkeypatch, model):
    assert error_of(monkeypatch, checks._Case(model=model)) < 1e-5


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_every_format_of_weights(monkeypatch, form):
    case = dataclasses.replace(checks._Case(form=form), dtype=torch.float16)
    assert error_of(monkeypatch, case) < 1e-2


@pytest.mark.parametrize(("kind", "tolerance"), [("int8", 0.04), ("fp8", 0.1)])
def test_every_format_of_kv(monkeypatch, kind, tolerance):
    assert error_of(monkeypatch, checks._Case(kv=kind)) < tolerance
