"""Models of transformers, written as GGUF, and read: the logits are those of transformers."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from tests.parity.every_case import CASES as EVERY_CASE
from tests.parity.gguf_file import write_gguf
from tests.parity.oracle import _model
from tests.parity.ours import load, run
from tests.parity.test_logits import TOLERANCES

from ridgeline.core.errors import RidgelineError, UnsupportedModelError
from ridgeline.models import describe, lower, read_config
from ridgeline.weights.gguf import GGUFCheckpoint, describe_gguf
from ridgeline.weights.gguf.metadata import check_content
from ridgeline.weights.matching import match_tensors, weight_shapes

CASES = {
    "afmoe-windows": "afmoe",
    "arcee-biases": "arcee",
    "bamba-plain": "granitehybrid",
    "cohere-head-norms": "command-r",
    "cohere2-windows": "cohere2",
    "deepseek_v2-published": "deepseek2",
    "deepseek_v3-groups": "deepseek2",
    "dots1-plain": "dots1",
    "ernie4_5-plain": "ernie4_5",
    "ernie4_5_moe-plain": "ernie4_5-moe",
    "falcon_h1-plain": "falcon-h1",
    "granitemoehybrid-dense-rope": "granitehybrid",
    "granitemoehybrid-experts": "granitehybrid",
    "lfm2-biases": "lfm2",
    "lfm2-plain": "lfm2",
    "lfm2_moe-plain": "lfm2moe",
    "mamba2-plain": "mamba2",
    "nemotron_h-dense": "nemotron_h",
    "nemotron_h-experts": "nemotron_h_moe",
    "exaone_moe-windows": "exaone-moe",
    "exaone4-no-windows": "exaone4",
    "exaone4-windows": "exaone4",
    "gemma-plain": "gemma",
    "gemma3n_text-shared-kv": "gemma3n",
    "gemma4_text-experts": "gemma4",
    "gemma4_text-keys-as-values": "gemma4",
    "gemma4_text-layer-inputs": "gemma4",
    "gemma4_text-shared-kv": "gemma4",
    "glm_moe_dsa-shared-choice": "glm-dsa",
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
    "jais2-plain": "jais2",
    "kimi_k2-plain": "deepseek2",
    "minimax_m2-plain": "minimax-m2",
    "mistral4-growing": "mistral4",
    "mistral4-groups": "mistral4",
    "ministral3-growing": "mistral3",
    "nemotron-biases": "nemotron",
    "olmo-clipped": "olmo",
    "olmo2-plain": "olmo2",
    "olmo3-windows": "olmo2",
    "olmoe-plain": "olmoe",
    "phi-plain": "phi2",
    "qwen2_moe-plain": "qwen2moe",
    "qwen3_5_moe_text-plain": "qwen35moe",
    "qwen3_5_text-plain": "qwen35",
    "qwen3_5_text-tied": "qwen35",
    "qwen3_moe-normed": "qwen3moe",
    "qwen3_next-published": "qwen3next",
    "qwen3_vl-vision-biases": "qwen3vl",
    "qwen3_vl_moe-vision-stacked": "qwen3vlmoe",
    "qwen2_5_vl-vision-plain": "qwen2vl",
    "seed_oss-plain": "seed_oss",
    "smollm3-published": "smollm3",
    "stablelm-plain": "stablelm",
}


ODD_VALUES = [
    0, 1, 3, -1, 2**31, 2**63 - 1, 0.0, 0.5, 1e30, float("nan"), True, False, "", "yarn", "none",
    np.zeros(0, bool), np.ones(3, np.int32), [], None,
]  # fmt: skip
MUTATIONS = 12


@pytest.mark.parametrize("case_id", CASES)
def test_gguf(case_id, oracle_of, tmp_path):
    oracle = oracle_of(case_id)
    path = tmp_path / "model.gguf"
    write_gguf(oracle.folder, path, CASES[case_id])
    logits = run(load(path).model, oracle.token_ids, prompt_tokens=len(oracle.prompt), name="cpu")
    assert np.abs(logits - oracle.logits).max() <= TOLERANCES["cpu"]
    _describe_mutations(path, random.Random(case_id))


# Converters multiply matrices by what the config has: the first field that differs.
FOLDED = {"falcon_h1-plain": r": layers\[0\]\.attention\.scale is 0\.235\d* and would become"}


def test_a_file_has_all_of_the_model_that_it_was_made_of(tmp_path):
    """Field by field, which logits need not show, nothing that its family does not know, and each
    tensor in its shape."""
    cases = {case.id: case for case in EVERY_CASE}
    for case_id, architecture in CASES.items():
        folder, path = tmp_path / case_id, tmp_path / f"{case_id}.gguf"
        _model(cases[case_id]).save_pretrained(folder)
        write_gguf(folder, path, architecture)
        with GGUFCheckpoint(path) as file:
            found = describe_gguf(file, strict=True)
            folded = FOLDED.get(case_id)
            with pytest.raises(UnsupportedModelError, match=folded) if folded else nullcontext():
                check_content(file, describe(read_config(folder)))
            shapes = weight_shapes(lower(found.spec))
            places = match_tensors(file, shapes, found.sources, found.ignored)
            held = [name for of in places.values() for names in of.values() for name in names]
            assert sorted(held) == sorted(shapes), case_id


def test_keys_that_files_may_leave_out_have_the_values_of_llama_cpp(tmp_path):
    """As ``src/models`` of llama.cpp, and what published models have."""
    cases = {case.id: case for case in EVERY_CASE}
    for case_id, name, value in (
        ("ernie4_5_moe-plain", "interleave_moe_layer_step", 1),
        ("granitemoehybrid-dense-rope", "expert_count", 0),
        ("granite-biases-tied", "attention.scale", 1 / 4),  # of heads of 16
        ("granite-biases-tied", "embedding_scale", 1.0),
        ("granite-biases-tied", "residual_scale", 1.0),
        ("granite-biases-tied", "logit_scale", 1.0),
        ("exaone_moe-windows", "attention.sliding_window_pattern", 4),
    ):
        folder, path, key = tmp_path / case_id, tmp_path / "x.gguf", f"{CASES[case_id]}.{name}"
        _model(cases[case_id]).save_pretrained(folder)
        write_gguf(folder, path, CASES[case_id])
        with GGUFCheckpoint(path) as file:
            without = {name: each for name, each in file.metadata.items() if name != key}
            if name.endswith("pattern"):  # which shows in more layers than it has
                without[f"{CASES[case_id]}.block_count"] = 8
            found, expected = (
                describe_gguf(_content(file, metadata)).spec
                for metadata in (without, {**without, key: value})
            )
        assert found == expected, case_id


def _content(file, metadata):
    """The file with other keys."""
    return SimpleNamespace(
        metadata=metadata,
        names=file.names,
        shape=file.shape,
        vector=file.vector,
        format_name=file.format_name,
    )


def _describe_mutations(path, rng):
    """The file's description with keys changed or gone: understood, or one error of ours."""
    with GGUFCheckpoint(path) as file:
        for _ in range(MUTATIONS):
            metadata = dict(file.metadata)
            for key in rng.sample(sorted(metadata), rng.randint(1, 3)):
                value = rng.choice(ODD_VALUES)
                if value is None or key == "general.architecture":
                    metadata.pop(key, None)
                else:
                    metadata[key] = value
            try:
                lower(describe_gguf(_content(file, metadata)).spec)
            except RidgelineError as error:
                assert "\n" not in str(error)
