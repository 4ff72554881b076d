"""Codes that are tuned a layer at a time: closer outputs, any format, and never worse."""

import numpy as np
import pytest
import torch
from tests.compress.folders import BIASED, EXPERTS, FUSED, SMALL, write_folder
from tests.compress.test_quantize import made, stored, text_of

from ridgeline.compress.gptq import round_nearest
from ridgeline.compress.grids import Integers
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.layerwise import LayerInputs
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.tuning import LatentMatrix, tune
from ridgeline.core.errors import SettingsError
from ridgeline.evaluation import QualitySum
from ridgeline.kernels.tensors import as_tensor


def divergence(folder, path, windows):
    total, models = QualitySum(), [LayeredModel.open(str(each)) for each in (folder, path)]
    for (tokens, wanted), (_, found) in zip(
        *(model.log_probabilities(windows) for model in models), strict=True
    ):
        total.add(tokens, found, wanted)
    return total.quality().kl


def test_tuned_codes_are_closer_to_the_model_than_gptqs(tmp_path):
    folder = write_folder(tmp_path / "model")
    windows = text_of(LayeredModel.open(str(folder))).windows
    made(folder, tmp_path / "gptq", Recipe(bits=3))
    report = made(folder, tmp_path / "tuned", Recipe(bits=3, tune=30))
    left = {note["tuned"] for note in report.notes.values()}
    assert len(left) == 3  # a figure for each layer
    assert max(left) < 0.8
    plain, tuned = (divergence(folder, tmp_path / name, windows) for name in ("gptq", "tuned"))
    assert tuned < 0.8 * plain


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        (SMALL, Recipe(bits=4, tune=3)),
        (BIASED, Recipe(bits=3, symmetric=False, tune=3)),
        (FUSED, Recipe(bits=5, group_size=16, tune=3)),
        (EXPERTS, Recipe(bits=3, tune=3)),
        (SMALL, Recipe(format="gptq", tune=3)),
        (SMALL, Recipe(bits_per_weight=5.0, tune=3)),
        (SMALL | {"hidden_size": 256, "intermediate_size": 256}, Recipe(format="gguf", tune=3)),
    ],
    ids=["llama", "zero points", "fused", "experts", "gptq", "mixed", "gguf"],
)
def test_the_file_holds_what_later_layers_were_tuned_on(config, recipe, tmp_path, monkeypatch):
    seen, plain = {}, LayerInputs.write_behind

    def kept(self, layer, weights, run):
        seen.update({name: weight.clone() for name, weight in weights.items()})
        plain(self, layer, weights, run)

    monkeypatch.setattr(LayerInputs, "write_behind", kept)
    out = tmp_path / ("out.gguf" if recipe.format == "gguf" else "out")
    made(write_folder(tmp_path / "model", config), out, recipe)
    matrices = {n: w for n, w in stored(out).items() if not isinstance(w, np.ndarray)}
    matrices = {n: w for n, w in matrices.items() if n in seen}
    assert len(matrices) >= 12
    for name, matrix in matrices.items():
        values = as_tensor(matrix.dequantize("float32"))
        torch.testing.assert_close(values, seen[name], rtol=1e-5, atol=1e-7)


def test_where_tuning_helps_nothing_all_is_as_it_was():
    """The rounded layer gives what it should already: every move is for the worse."""
    model = LayeredModel.open(None)
    run, weights = model.runs[1], model.weights(1)
    grid = Integers(bits=4, group_size=32)
    names = [name for name, weight in weights.items() if weight.ndim == 2]
    latents = {}
    for name in names:
        before = weights[name].clone()
        found = round_nearest(weights[name], grid, None, out_OI=weights[name])
        latents[name, None] = LatentMatrix(before, weights[name], found, grid)
    rounded = {name: weights[name].clone() for name in names}
    codes = {key: latent.rounded().codes_OI for key, latent in latents.items()}
    from ridgeline.compress.block_forward import BlockForward

    window = tuple(range(10, 40))
    x_TD = torch.randn(30, 384, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = BlockForward(weights, [window], x_TD=x_TD).run(run)
        random = np.random.default_rng(0)
        example = x_TD, wanted, window
        left = tune(run, weights, latents, [30], lambda _: example, steps=3, random=random)
    assert left == 1.0
    for name in names:
        assert torch.equal(weights[name], rounded[name])
        assert torch.equal(latents[name, None].rounded().codes_OI, codes[name, None])


def test_tuning_is_of_codes_that_gptq_chose():
    for settings in ({"method": "rtn"}, {"keep_zeros": True}, {"tune": -1}):
        with pytest.raises(SettingsError, match="tune"):
            Recipe(**{"tune": 5, **settings})
