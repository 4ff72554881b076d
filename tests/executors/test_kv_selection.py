"""What SnapKV keeps of a prompt, against attention that transformers computes."""

import numpy as np
import pytest
import torch
import transformers
from tests.parity.cases import SIZES
from torch.nn import functional

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequestError
from ridgeline.executors.cpu import kv_selection as on_cpu
from ridgeline.executors.kv_selection import chosen_slots
from ridgeline.executors.reference import forward
from ridgeline.kernels.cpu.library import native_kernels_run

WIDTH, BUDGET, LENGTH = 20, 60, 200
CONFIG = SIZES | {"max_position_embeddings": 256, "pad_token_id": 0, "attention_bias": True}

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="the cpu executor does not run")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """A model whose attention is telling, a prompt, and the best slots ``[L, K, BUDGET - WIDTH]``
    by Li et al., arXiv 2404.14469, with the published code's average pooling over 5."""
    folder = tmp_path_factory.mktemp("selection")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", **CONFIG), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = 15 if "q_proj" in name or "k_proj" in name else 1 if "norm" in name else 3
            parameter.mul_(gain)
        model.save_pretrained(folder)
        prompt = torch.randint(1, 199, (1, LENGTH))
        attention = torch.cat(model(prompt, output_attentions=True).attentions)
    seen = attention[:, :, -WIDTH:, : LENGTH - WIDTH].mean(2)
    scores = functional.avg_pool1d(seen, kernel_size=5, padding=2, stride=1)
    of_kv_heads = scores.unflatten(1, (CONFIG["num_key_value_heads"], -1)).mean(2)
    return folder, prompt[0].tolist(), of_kv_heads.topk(BUDGET - WIDTH).indices.numpy()


@pytest.mark.parametrize(
    ("executor", "kv", "least"),
    [
        ("reference", "auto", 0.99),
        ("cpu", "auto", 0.99),
        ("cpu", "int8", 0.95),
        ("cpu", "fp8", 0.9),
    ],
)
def test_chosen_tokens_are_those_of_transformers_attention(
    oracle, monkeypatch, executor, kv, least
):
    folder, prompt, expected = oracle
    chosen = []

    def noted(*args):
        chosen.append(chosen_slots(*args))
        return chosen[-1]

    monkeypatch.setattr(on_cpu if executor == "cpu" else forward, "chosen_slots", noted)
    compression = {"method": "snapkv", "window": WIDTH, "budget": BUDGET}
    params = SamplingParams(max_tokens=2, temperature=0.0, kv_compression=compression)
    settings = {"executor": executor, "dtype": "float32", "kv_cache_dtype": kv}
    with LLM(str(folder), **settings, max_num_batched_tokens=64, block_tokens=16) as llm:
        llm.generate([prompt], params)
    assert [each.shape for each in chosen] == [expected[0].shape] * len(expected)
    same = [
        len(np.intersect1d(ours, theirs)) / len(theirs)
        for ours, theirs in zip(np.concatenate(chosen), np.concatenate(expected), strict=True)
    ]
    assert np.mean(same) >= least
    assert np.mean(same) > 2 * BUDGET / LENGTH  # far from chance


def test_what_it_does_not_work_with_is_said(oracle):
    folder, prompt, _ = oracle
    params = SamplingParams(kv_compression={"method": "snapkv", "window": 40, "budget": 60})
    settings = {"executor": "cpu", "block_tokens": 16}
    with LLM(str(folder), **settings, max_num_batched_tokens=32) as llm:  # noqa: SIM117
        with pytest.raises(InvalidRequestError, match="at most max_num_batched_tokens"):
            llm.generate([prompt], params)
