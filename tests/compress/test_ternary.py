"""`distill --ternary`: what is trained is in the file, as transformers and we compute it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from tests.compress.folders import BIASED, EXPERTS, FUSED, SMALL, write_folder
from tests.compress.test_distilling import QUICK, distance, opened, text

from ridgeline import LLM
from ridgeline.compress.block_model import BlockModel
from ridgeline.compress.quantize import quantize
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.tensors import products
from ridgeline.compress.ternary import Ternary, ternary_codes
from ridgeline.compress.training import distill
from ridgeline.core.errors import SettingsError, UnsupportedModelError
from ridgeline.evaluation import QualitySum, served_log_probabilities
from ridgeline.quant import QuantizedTensor

__all__ = ["text"]  # a fixture
TERNARY = replace(QUICK, ternary=True, steps=8, learning_rate=1e-2)
UNTRAINED = replace(TERNARY, steps=1, learning_rate=0.0)


@pytest.mark.parametrize("config", [SMALL, BIASED], ids=lambda c: c["model_type"])
def test_transformers_computes_from_the_file_what_was_trained(config, tmp_path, text):
    """To the rounding of inputs to bytes, which both have."""
    parent = opened(write_folder(tmp_path / "parent", config))
    distill(parent, parent, tmp_path / "out", UNTRAINED, text)
    with torch.compiler.set_stance("force_eager"):  # its codes are unpacked by what it compiles
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.nn.Module.float(theirs)  # what transformers refuses for any quantized model
    names = {name for run in parent.runs[1:-1] for name in products(run)}
    ours = BlockModel(parent, view=lambda name, _: Ternary() if name in names else None)
    ids = torch.tensor([text.tokens[:50]])
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        wanted, found = theirs(ids).logits[0], ours(ids)
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (BlockModel(parent)(ids) - wanted).abs().max() > 0.1


def test_codes_are_the_nearest_to_the_weights_over_their_mean_magnitude():
    weight = torch.tensor([[0.1, -2.0, 0.6], [-0.4, 3.0, -0.5]])
    codes, scale = ternary_codes(weight)
    assert float(scale) == pytest.approx(1.1, rel=2**-8)
    assert codes.tolist() == [[0.0, -1.0, 1.0], [0.0, 1.0, 0.0]]


def test_training_brings_the_ternary_model_nearer_to_its_parent(tmp_path, text):
    parent = opened(write_folder(tmp_path / "parent", SMALL))
    trained = replace(TERNARY, steps=20, learning_rate=3e-3)  # with more it is chance how near
    for name, recipe in (("before", UNTRAINED), ("after", trained)):
        distill(parent, parent, tmp_path / name, recipe, text)
    before, after = (distance(tmp_path / name, parent, text) for name in ("before", "after"))
    assert after < 0.8 * before


def test_the_file_is_served_as_it_is(tmp_path, text):
    parent = opened(write_folder(tmp_path / "parent", SMALL))
    distill(parent, parent, tmp_path / "out", TERNARY, text)
    out = opened(tmp_path / "out")
    ternary = [w for _, w in out.stored.items() if isinstance(w, QuantizedTensor)]
    assert len(ternary) == 7 * len(parent.runs[1:-1])
    assert {int(code) for w in ternary for code in np.unique(w.codes)} == {-1, 0, 1}
    total, documents = QualitySum(), [text.tokens[:100]]
    with LLM(str(tmp_path / "out"), dtype="float32") as llm:
        served = list(served_log_probabilities(llm, documents))
    for (tokens, wanted), (_, found) in zip(out.log_probabilities(documents), served, strict=True):
        total.add(tokens, found, wanted)
    assert total.quality().kl < 0.02 * distance(tmp_path / "out", parent, text)


def test_what_the_files_cannot_say_is_refused_by_name(tmp_path, text):
    for config, what in (
        (EXPERTS, "layers.0.experts.gate cannot be ternary"),
        (FUSED, "layers.0.q cannot"),
    ):
        model = opened(write_folder(tmp_path / config["model_type"], config))
        with pytest.raises(UnsupportedModelError, match=what):
            distill(model, model, tmp_path / "out", TERNARY, text)
    parent = opened(write_folder(tmp_path / "parent", SMALL))
    quantize(parent, tmp_path / "int4", Recipe(method="rtn"), None)
    with pytest.raises(SettingsError, match="a model of floats"):
        distill(opened(tmp_path / "int4"), parent, tmp_path / "out", TERNARY, text)
    zeros = replace(QUICK, keep_zeros=True)
    with pytest.raises(SettingsError, match="where zeros do not stay"):
        distill(opened(tmp_path / "int4"), parent, tmp_path / "out", zeros, text)
    with pytest.raises(SettingsError, match="keep_zeros has no effect"):
        replace(TERNARY, keep_zeros=True)


def test_the_config_says_bitnet_and_keeps_the_rest(tmp_path, text):
    parent = opened(write_folder(tmp_path / "parent", SMALL))
    distill(parent, parent, tmp_path / "out", UNTRAINED, text)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "bitnet"
    assert config == SMALL
