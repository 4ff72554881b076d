"""`prune`: which weights go, what the others make good, and smaller models that others read."""

import hashlib
import json

import numpy as np
import pytest
import torch
import transformers
from tests.compress.folders import BIASED, EXPERTS, FUSED, LATENT, SMALL, write_folder
from tests.parity.every_case import CASES
from tests.parity.oracle import _model
from tests.tiny import NORMED_INSIDE

from ridgeline import LLM
from ridgeline.cli import main
from ridgeline.compress.calibration import calibration_text
from ridgeline.compress.hessian import Curvature
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.pruning.masks import mask_of
from ridgeline.compress.pruning.prune import prune
from ridgeline.compress.pruning.recipe import PruneRecipe
from ridgeline.compress.pruning.sparsegpt import prune_sparsegpt
from ridgeline.compress.pruning.structure import group_errors, refit
from ridgeline.compress.quantize import quantize
from ridgeline.compress.recipe import Recipe
from ridgeline.core.errors import SettingsError, UnsupportedModelError
from ridgeline.kernels.tensors import as_tensor

GROUPED = BIASED | {"num_key_value_heads": 2}
DEEP = SMALL | {"num_hidden_layers": 4}


def text_of(model):
    return calibration_text("embedded", model.loaded, PruneRecipe(window_tokens=64, num_windows=4))


def made(folder, out, recipe=None, **options):
    model = LayeredModel.open(str(folder))
    return prune(model, out, recipe or PruneRecipe(), text_of(model), **options)


def stored(folder):
    return {
        name: as_tensor(weight).float()
        for name, weight in LayeredModel.open(str(folder)).stored.items()
    }


def digest(folder):
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "lfm2", "qwen3_next", "gemma2"])
def test_what_takes_nothing_away_writes_every_tensor_as_it_was(family, tmp_path):
    """Whichever way round, in turns, fused or stacked a checkpoint has them."""
    folder = tmp_path / "model"
    case = next(case for case in CASES if case.family == family)
    torch.manual_seed(3)
    _model(case).save_pretrained(folder)
    prune(
        LayeredModel.open(str(folder)),
        tmp_path / "out",
        PruneRecipe(method="magnitude", sparsity=0.0),
        None,
    )
    before, after = stored(folder), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


@pytest.mark.parametrize("config", [FUSED, EXPERTS, LATENT], ids=lambda c: c["model_type"])
def test_half_of_every_matrix_of_the_layers_is_zero(config, tmp_path):
    folder = write_folder(tmp_path / "model", config)
    report = made(folder, tmp_path / "out", PruneRecipe(pattern="2:4"))
    assert report.sparsity == 0.5
    before, after = stored(folder), stored(tmp_path / "out")
    changed = {name.partition("[")[0] for name in report.notes}
    assert len(changed) >= 7
    for name, weight in after.items():
        if name in changed:
            assert torch.all((weight.unflatten(-1, (-1, 4)) == 0).sum(-1) >= 2), name
        else:
            assert torch.equal(weight, before[name]), name


def test_wandas_masks_are_the_papers(tmp_path):
    """|w| times the norm of the input that transformers' own model gives it, by rows."""
    folder = write_folder(tmp_path / "model", SMALL)
    model = LayeredModel.open(str(folder))
    text = text_of(model)
    prune(model, tmp_path / "out", PruneRecipe(method="wanda"), text)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    squares = {}
    layer = theirs.model.layers[0]
    modules = {"q": layer.self_attn.q_proj, "k": layer.self_attn.k_proj,
               "v": layer.self_attn.v_proj}  # fmt: skip
    for name, module in modules.items():
        module.register_forward_hook(
            lambda _, inputs, __, name=name: squares.setdefault(name, []).append(
                inputs[0].double().square().sum((0, 1)).numpy()
            )
        )
    with torch.no_grad():
        for window in text.windows:
            theirs(torch.tensor([window]))
    after = stored(tmp_path / "out")
    for name, module in modules.items():
        weight = module.weight.detach().double().numpy()
        scores = np.abs(weight) * np.sqrt(np.sum(squares[name], axis=0))
        wanted = np.argsort(np.argsort(scores, axis=1), axis=1) < weight.shape[1] // 2
        found = after[f"layers.0.{name}"].numpy() == 0
        assert (found == wanted).mean() >= 0.999


def inputs(columns=128, tokens=1024):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    x_TI = torch.randn(tokens, columns, generator=generator) @ (mixing + torch.eye(columns))
    x_TI *= torch.linspace(0.2, 2.0, columns)
    return torch.randn(64, columns, generator=generator), x_TI.T @ x_TI / tokens, x_TI


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "4:8"])
def test_the_calibrated_methods_keep_more_of_the_outputs(pattern):
    w_OI, hessian_II, x_TI = inputs()
    errors = {}
    for method in ("sparsegpt", "wanda", "magnitude", "random"):
        recipe, found_OI = PruneRecipe(method=method, pattern=pattern), w_OI.clone()
        if method == "sparsegpt":
            prune_sparsegpt(found_OI, Curvature.of(hessian_II.clone(), by_diagonal=False), recipe)
        else:
            found_OI[mask_of(w_OI, hessian_II, recipe, torch.Generator())] = 0
        assert (found_OI == 0).float().mean() == 0.5
        errors[method] = float((x_TI @ (found_OI - w_OI).T).square().sum())
    order = ["sparsegpt", "wanda", "magnitude", "random"]
    assert sorted(errors, key=errors.get) == order
    assert errors["sparsegpt"] < 0.85 * errors["wanda"]


def test_what_is_left_of_a_matrix_fits_its_outputs_best():
    w_OI, hessian_II, x_TI = inputs()
    errors_G = group_errors(w_OI, hessian_II, 16)
    kept_I = torch.cat([torch.arange(8, 64), torch.arange(72, 128)])  # all but groups 0 and 8
    best = torch.linalg.lstsq(x_TI[:, kept_I], x_TI @ w_OI.T).solution.T
    found = refit(w_OI, hessian_II, kept_I)
    error, least = (
        float((x_TI @ w_OI.T - x_TI[:, kept_I] @ each.T).square().sum()) for each in (found, best)
    )
    assert least <= error < 1.05 * least
    damped_II = hessian_II + 1e-3 * hessian_II.diagonal().mean() * torch.eye(128)
    exact = []
    for group in range(16):
        kept = torch.arange(128).view(16, 8)[torch.arange(16) != group].flatten()
        lost_OI = w_OI.clone()
        lost_OI[:, kept] -= refit(w_OI, hessian_II, kept)
        exact.append((lost_OI @ damped_II * lost_OI).sum())
    torch.testing.assert_close(errors_G, torch.stack(exact), rtol=1e-3, atol=0)


@pytest.mark.parametrize("config", [SMALL, GROUPED, FUSED], ids=lambda c: c["model_type"])
def test_smaller_models_are_read_by_transformers_and_compute_the_same(config, tmp_path):
    folder = write_folder(tmp_path / "model", config)
    recipe = PruneRecipe(remove_kv_heads=1, remove_ffn=0.33, remove_layers=1)
    report = made(folder, tmp_path / "out", recipe)
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert len(report.removed_layers) == 1
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == (2, 1)
    assert (found["intermediate_size"], found["num_hidden_layers"]) == (64, 2)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = list(range(5, 60))
    with (
        torch.no_grad(),
        LLM(str(tmp_path / "out"), executor="reference", dtype="float32") as ours,
    ):
        wanted = theirs(torch.tensor([tokens])).logits[0].numpy()
        np.testing.assert_allclose(ours.logits(tokens), wanted, atol=2e-5)


def test_layers_that_do_nothing_go_first_and_the_rest_is_as_it_was(tmp_path):
    def idle(weights):
        for name in ("layers.1.o", "layers.1.down", "layers.2.o", "layers.2.down"):
            weights[name] *= 1e-3

    folder = write_folder(tmp_path / "model", DEEP, change=idle)
    report = made(folder, tmp_path / "out", PruneRecipe(remove_layers=2))
    assert report.removed_layers == (1, 2)
    before, after = stored(folder), stored(tmp_path / "out")
    assert torch.equal(after["layers.1.gate"], before["layers.3.gate"])
    assert torch.equal(after["layers.0.q"], before["layers.0.q"])


def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path):
    folder, recipe = write_folder(tmp_path / "model", DEEP), PruneRecipe(remove_ffn=0.3)
    made(folder, tmp_path / "whole", recipe)

    def stop(layer, *_):
        if layer == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(folder, tmp_path / "out", recipe, progress=stop)
    with pytest.raises(SettingsError, match="prune differ"):
        made(folder, tmp_path / "out", PruneRecipe(remove_ffn=0.5), resume=True)
    made(folder, tmp_path / "out", recipe, resume=True)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_zeros_outlive_quantization(tmp_path):
    folder = write_folder(tmp_path / "model", SMALL)
    report = made(folder, tmp_path / "sparse")
    model = LayeredModel.open(str(tmp_path / "sparse"))
    zeros = {}
    for keep in (True, False):
        recipe = Recipe(keep_zeros=keep, window_tokens=64)
        quantize(model, tmp_path / f"int4-{keep}", recipe, text_of(model))
        found = dict(LayeredModel.open(str(tmp_path / f"int4-{keep}")).stored.items())
        zeros[keep] = [
            np.all(found[name].dequantize("float32")[weight == 0] == 0)
            for name, weight in stored(tmp_path / "sparse").items()
            if name in report.notes
        ]
    assert all(zeros[True])
    assert not all(zeros[False])


def test_what_cannot_be_left_is_told(tmp_path, capsys):
    experts = write_folder(tmp_path / "experts", EXPERTS)
    with pytest.raises(UnsupportedModelError, match="no feed-forward channels"):
        made(experts, tmp_path / "out1", PruneRecipe(remove_ffn=0.5))
    with pytest.raises(SettingsError, match="below 2"):
        made(experts, tmp_path / "out2", PruneRecipe(remove_kv_heads=2))
    with pytest.raises(SettingsError, match="below 3"):
        made(experts, tmp_path / "out3", PruneRecipe(remove_layers=3))
    with pytest.raises(UnsupportedModelError, match="no whole groups of 5"):
        made(experts, tmp_path / "out4", PruneRecipe(pattern="2:5"))
    inside = write_folder(tmp_path / "inside", NORMED_INSIDE)
    for removed in ({"remove_ffn": 0.5}, {"remove_kv_heads": 1}):
        with pytest.raises(UnsupportedModelError, match="norms over all heads and channels"):
            made(inside, tmp_path / "out6" / next(iter(removed)), PruneRecipe(**removed))
    words = ["prune", str(experts), "-o", str(tmp_path / "out5"), "--no-quality"]
    assert main([*words, "--remove-layers", "1", "--sparsity", "0.3"]) == 2
    assert "prune twice" in capsys.readouterr().err
    assert main([*words, "--method", "magnitude", "--pattern", "2:4"]) == 0
    assert "50.0% of the layers' are zero" in capsys.readouterr().out
