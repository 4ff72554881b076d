"""Models of transformers, written as GGUF, and read: the logits are those of transformers."""

import numpy as np
import pytest
from tests.parity.gguf_file import write_gguf
from tests.parity.ours import load, run
from tests.parity.test_logits import TOLERANCES

CASES = {
    "arcee-biases": "arcee",
    "cohere-head-norms": "command-r",
    "cohere2-windows": "cohere2",
    "deepseek_v2-published": "deepseek2",
    "deepseek_v3-groups": "deepseek2",
    "dots1-plain": "dots1",
    "ernie4_5-plain": "ernie4_5",
    "ernie4_5_moe-plain": "ernie4_5-moe",
    "exaone4-no-windows": "exaone4",
    "exaone4-windows": "exaone4",
    "gemma-plain": "gemma",
    "glm4-plain": "glm4",
    "glm4_moe-groups": "glm4moe",
    "glm4_moe-plain": "glm4moe",
    "glm4_moe_lite-plain": "deepseek2",
    "gpt_oss-published": "gpt-oss",
    "granite-biases-tied": "granite",
    "granitemoe-plain": "granitemoe",
    "granitemoeshared-biases": "granitemoe",
    "hunyuan_v1_dense-alpha": "hunyuan-dense",
    "hunyuan_v1_moe-plain": "hunyuan-moe",
    "kimi_k2-plain": "deepseek2",
    "minimax_m2-plain": "minimax-m2",
    "ministral3-growing": "mistral3",
    "nemotron-biases": "nemotron",
    "olmo-clipped": "olmo",
    "olmo2-plain": "olmo2",
    "olmo3-windows": "olmo2",
    "olmoe-plain": "olmoe",
    "phi-plain": "phi2",
    "qwen2_moe-plain": "qwen2moe",
    "qwen3_moe-normed": "qwen3moe",
    "qwen3_vl-vision-biases": "qwen3vl",
    "qwen3_vl_moe-vision-stacked": "qwen3vlmoe",
    "qwen2_5_vl-vision-plain": "qwen2vl",
    "seed_oss-plain": "seed_oss",
    "smollm3-published": "smollm3",
    "stablelm-plain": "stablelm",
}


@pytest.mark.parametrize("case_id", CASES)
def test_gguf(case_id, oracle_of, tmp_path):
    oracle = oracle_of(case_id)
    path = tmp_path / "model.gguf"
    write_gguf(oracle.folder, path, CASES[case_id])
    logits = run(load(path).model, oracle.token_ids, prompt_tokens=len(oracle.prompt), name="cpu")
    assert np.abs(logits - oracle.logits).max() <= TOLERANCES["cpu"]
