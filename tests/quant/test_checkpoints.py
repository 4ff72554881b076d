"""Quantized checkpoints give the logits of the writing library's own dequantized model.

The folders in ``tests/data/quantized`` were written by the libraries (``make_checkpoints.py``); the
metadata of ``expected.safetensors`` names library and version, or says that the layout was rebuilt
from its description.
"""

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.parity import ours

from ridgeline.core.config import EngineConfig
from ridgeline.engine.loading import load_model
from ridgeline.models import describe, lower, read_config
from ridgeline.quant import QuantizedTensor, read_scheme
from ridgeline.weights import CheckpointWeights, expanded_weights

FOLDERS = sorted((Path(__file__).parents[1] / "data" / "quantized").iterdir())
SAMPLE = "model.layers.0.self_attn.k_proj.weight"
BITS = {"ct-int4-group": 4.5, "ct-w8a8": 8.25, "bnb-nf4-double": 4.127, "mxfp4-gpt-oss": 4.25}
BITS |= {"bitnet-bitlinear": 2, "bitnet-autobitlinear": 2}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_logits_are_those_of_the_librarys_dequantized_model(folder: Path) -> None:
    expected = load_file(folder / "expected.safetensors")
    dtype = str(expected.get(SAMPLE, torch.empty(0)).dtype)  # what the library expands to
    loaded = load_model(EngineConfig(model=str(folder), dtype=dtype))
    values = expanded_weights(loaded.model.weights, loaded.model.dtype)
    weights = {name: weight.astype(np.float32) for name, weight in values.items()}
    model = dataclasses.replace(loaded.model, weights=weights, dtype="float32")
    token_ids = expected["token_ids"].tolist()
    logits = ours.run(model, token_ids, prompt_tokens=len(token_ids))
    assert np.abs(expected["logits"].numpy()).max() > 1
    np.testing.assert_allclose(logits, expected["logits"].numpy(), atol=1e-3, rtol=0)
    if SAMPLE in expected:
        key = expected[SAMPLE].float().numpy()
        np.testing.assert_allclose(
            weights["layers.0.k"], key, rtol=0, atol=1e-6 * np.abs(key).max()
        )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_executors_can_have_the_codes_themselves(folder: Path) -> None:
    definition = describe(read_config(folder))
    assert definition.quantization is not None
    arguments = {
        "ops": lower(definition.spec),
        "sources": definition.sources,
        "ignored": definition.ignored,
        "dtype": "float32",
    }
    scheme = read_scheme(definition.quantization, strict=True)
    weights = CheckpointWeights(path=folder, quantization=scheme, **arguments)
    loaded, packed = dict(weights.values()), dict(weights.items())
    assert packed.keys() == loaded.keys()
    quantized = {name: w for name, w in packed.items() if isinstance(w, QuantizedTensor)}
    assert len(quantized) >= 2
    for name, weight in packed.items():
        values = weight.dequantize("float32") if name in quantized else weight
        assert np.array_equal(values, loaded[name]), name
    if folder.name in BITS:
        weight = quantized.get("layers.0.q") or next(iter(quantized.values()))
        bits = weight.num_bytes * 8 / weight.codes.size
        assert bits == pytest.approx(BITS[folder.name], abs=0.01)


def test_what_is_stored_and_not_used_is_said(caplog: pytest.LogCaptureFixture) -> None:
    folder = next(folder for folder in FOLDERS if folder.name == "ct-w8a8")
    with caplog.at_level(logging.WARNING):
        expanded_weights(load_model(EngineConfig(model=str(folder))).model.weights, "float32")
    assert "activations are not quantized" in caplog.text
