"""Importance matrices of our own."""

from pathlib import Path

import numpy as np
import pytest
from tests.parity.ours import load
from tests.weights.gguf_export import write_checkpoint
from tests.weights.test_gguf_models import CASES

from ridgeline.compress.imatrix import collect_importance
from ridgeline.core.errors import UnsupportedModelError
from ridgeline.weights import expanded_weights
from ridgeline.weights.conversion import convert_to_gguf
from ridgeline.weights.gguf.imatrix import read_imatrix

WINDOWS = [tuple(np.random.default_rng(seed).integers(0, 101, 48).tolist()) for seed in range(4)]


def test_importance_is_the_mean_square_of_what_each_matrix_reads(tmp_path: Path) -> None:
    write_checkpoint(CASES["mixtral"][1], tmp_path / "model")
    loaded = load(tmp_path / "model")
    found = collect_importance(loaded.model, WINDOWS, dataset="random")
    tokens = sum(map(len, WINDOWS))
    weights = expanded_weights(loaded.model.weights, "float32")
    embedded = np.concatenate([weights["embed"][list(window)] for window in WINDOWS])
    normed = embedded / np.sqrt(np.square(embedded).mean(-1, keepdims=True) + 1e-3)
    wanted = np.square(normed * weights["layers.0.attention_norm"]).mean(0)
    for module in ("attn_q", "attn_k", "attn_v"):
        importance = found.of(f"blk.0.{module}.weight", 64)
        assert importance is not None
        np.testing.assert_allclose(importance, wanted, rtol=1e-4)
    experts = found.counts["blk.1.ffn_down_exps.weight"]
    assert experts.shape == (4,)
    assert experts.sum() == 2 * tokens  # each token goes to two
    assert found.sums["output.weight"].shape == (1, 64)
    assert (found.chunks, found.chunk_tokens) == (4, 48)
    found.save(tmp_path / "imatrix.gguf")
    again = read_imatrix(tmp_path / "imatrix.gguf")
    assert all(np.array_equal(again.sums[name], sums) for name, sums in found.sums.items())
    convert_to_gguf(tmp_path / "model", tmp_path / "x.gguf", "q4_0", name="x", importance=again)


def test_fused_projections_have_one_entry(tmp_path: Path) -> None:
    write_checkpoint(CASES["phi3"][1], tmp_path / "model")
    found = collect_importance(load(tmp_path / "model").model, WINDOWS, dataset="random")
    assert {name for name in found.sums if "blk.0" in name} == {
        f"blk.0.{module}.weight" for module in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    }
    assert found.counts["blk.0.attn_qkv.weight"] == sum(map(len, WINDOWS))


def test_models_without_a_place_in_gguf_are_refused(tmp_path: Path) -> None:
    config = dict(CASES["llama"][1]) | {"model_type": "olmo2"}
    write_checkpoint(config, tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="olmo2 are not written as GGUF"):
        collect_importance(load(tmp_path / "model").model, WINDOWS, dataset="x")
