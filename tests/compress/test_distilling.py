"""`distill`: students of any family, in float and in the grid of their codes."""

import hashlib
import json

import numpy as np
import pytest
import torch
from tests.compress.folders import BIASED, EXPERTS, FUSED, SMALL, write_folder
from torch.nn import functional

from ridgeline.cli import main
from ridgeline.compress.block_model import BlockModel, LowRankView
from ridgeline.compress.calibration import TrainingText, training_text
from ridgeline.compress.distill import divergences
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.pruning.prune import prune
from ridgeline.compress.pruning.recipe import PruneRecipe
from ridgeline.compress.quantize import quantize
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.training import distill
from ridgeline.compress.training_recipe import TrainingRecipe
from ridgeline.core.errors import InvalidRequestError, SettingsError, UnsupportedModelError
from ridgeline.evaluation import QualitySum
from ridgeline.kernels.tensors import as_tensor
from ridgeline.quant import QuantizedTensor

QUICK = TrainingRecipe(
    steps=6,
    step_tokens=256,
    micro_batch_tokens=128,
    window_tokens=64,
    learning_rate=2e-3,
    checkpoint_every=2,
)


def opened(folder):
    return LayeredModel.open(str(folder))


@pytest.fixture(scope="module")
def text():
    model = LayeredModel.open(None)
    tokens = training_text("embedded", model.loaded).tokens[:4000]
    return TrainingText(source="embedded", tokens=tokens)


def distance(path, reference, text):
    total, documents = QualitySum(), [text.tokens[:200]]
    for (tokens, wanted), (_, found) in zip(
        reference.log_probabilities(documents), opened(path).log_probabilities(documents),
        strict=True,
    ):  # fmt: skip
        total.add(tokens, found, wanted)
    return total.quality().kl


def digest(folder):
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@pytest.mark.parametrize("config", [BIASED, FUSED, EXPERTS], ids=lambda c: c["model_type"])
def test_a_student_of_any_family_comes_nearer_to_its_teacher(config, tmp_path, text):
    teacher = opened(write_folder(tmp_path / "teacher", config))
    student = write_folder(tmp_path / "student", config, seed=1)
    report = distill(opened(student), teacher, tmp_path / "out", QUICK, text)
    assert report.last_loss < report.first_loss
    assert report.num_tokens == 6 * 256
    before, after = (distance(path, teacher, text) for path in (student, tmp_path / "out"))
    assert after < before


def test_zeros_outlive_training(tmp_path, text):
    folder = write_folder(tmp_path / "model", SMALL)
    report = prune(opened(folder), tmp_path / "cut", PruneRecipe(method="magnitude"), None)
    for keep in (True, False):
        recipe = TrainingRecipe(**{**_fields(QUICK), "keep_zeros": keep})
        distill(opened(tmp_path / "cut"), opened(folder), tmp_path / f"{keep}", recipe, text)
    before, kept, lost = (
        {k: as_tensor(w) for k, w in opened(tmp_path / n).stored.items() if k in report.notes}
        for n in ("cut", "True", "False")
    )
    assert all(torch.all(kept[name][weight == 0] == 0) for name, weight in before.items())
    assert not all(torch.equal(kept[name], weight) for name, weight in before.items())
    assert not any(torch.all(lost[name][weight == 0] == 0) for name, weight in before.items())


def _fields(recipe):
    return {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(bits=3, window_tokens=64, num_windows=4),
        Recipe(bits=4, symmetric=False, method="rtn"),
        Recipe(bits=4, format="gptq", method="rtn"),
    ],
    ids=["factored int3", "zero points", "gptq"],
)
def test_codes_are_trained_in_the_grid_of_the_file(recipe, tmp_path, text):
    """They start as the file's; steps that are large enough move them, and scales stay."""
    from ridgeline.compress.calibration import calibration_text

    teacher = opened(write_folder(tmp_path / "teacher", SMALL))
    calibrated = calibration_text("embedded", teacher.loaded, recipe)
    quantize(teacher, tmp_path / "small", recipe, calibrated if recipe.is_calibrated else None)
    untrained = TrainingRecipe(**{**_fields(QUICK), "steps": 1, "learning_rate": 0.0})
    distill(opened(tmp_path / "small"), teacher, tmp_path / "same", untrained, text)
    coarse = TrainingRecipe(**{**_fields(QUICK), "learning_rate": 5e-2})
    distill(opened(tmp_path / "small"), teacher, tmp_path / "out", coarse, text)
    small, same, out = (
        dict(opened(tmp_path / name).stored.items()) for name in ("small", "same", "out")
    )
    moved = 0
    for name, weight in small.items():
        if isinstance(weight, QuantizedTensor):
            assert np.array_equal(weight.codes, same[name].codes), name
            assert np.array_equal(weight.scales, out[name].scales), name
            moved += int((weight.codes != out[name].codes).sum())
    assert moved > 0


def test_an_interrupted_run_goes_on_to_the_same_weights(tmp_path, text):
    teacher = opened(write_folder(tmp_path / "teacher", SMALL))
    student = opened(write_folder(tmp_path / "student", SMALL, seed=1))
    whole = distill(student, teacher, tmp_path / "whole", QUICK, text)

    def stop(step, *_):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(student, teacher, tmp_path / "out", QUICK, text, progress=stop)
    assert not (tmp_path / "out" / "config.json").exists()
    other = TrainingText(source="other", tokens=text.tokens[1:])
    with pytest.raises(SettingsError, match="text differ"):
        distill(student, teacher, tmp_path / "out", QUICK, other, resume=True)
    metrics = tmp_path / "out" / ".ridgeline-state" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 6, "lo')  # as a kill leaves it
    report = distill(student, teacher, tmp_path / "out", QUICK, text, resume=True)
    assert (report.first_loss, report.last_loss) == (whole.first_loss, whole.last_loss)
    assert digest(tmp_path / "whole") == digest(tmp_path / "out")


def test_gradients_add_up_to_those_of_one_batch(tmp_path, text):
    model = opened(write_folder(tmp_path / "model", SMALL))
    for tokens in (128, 256):
        recipe = TrainingRecipe(**{**_fields(QUICK), "micro_batch_tokens": tokens, "steps": 2})
        distill(model, None, tmp_path / f"{tokens}", TrainingRecipe(
            **{**_fields(recipe), "kl_share": 0.0}), text)  # fmt: skip
    one, two = (dict(opened(tmp_path / n).stored.items()) for n in ("128", "256"))
    for name, weight in one.items():  # after steps of 2e-3, rounded to bfloat16
        torch.testing.assert_close(
            as_tensor(weight).float(), as_tensor(two[name]).float(), rtol=1e-2, atol=3e-3
        )


def test_of_a_few_tokens_and_the_rest_the_divergence_is_that_of_the_sums():
    generator = torch.Generator().manual_seed(0)
    wanted, got = (
        functional.log_softmax(3 * torch.randn(20, 50, generator=generator), dim=-1)
        for _ in range(2)
    )
    whole = functional.kl_div(got, wanted, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(divergences(wanted, got), whole)
    torch.testing.assert_close(divergences(wanted, got, top_k=49), whole, atol=1e-4, rtol=1e-4)
    top = wanted.topk(5).indices
    rest = torch.ones_like(wanted).scatter(1, top, 0.0)
    sums = [
        torch.cat([each.exp().gather(1, top), (each.exp() * rest).sum(1, keepdim=True)], 1)
        for each in (wanted, got)
    ]
    by_hand = (sums[0] * (sums[0] / sums[1]).log()).sum(1)
    torch.testing.assert_close(divergences(wanted, got, top_k=5), by_hand)
    assert torch.all(by_hand <= whole)


def test_a_fresh_adapter_changes_nothing_and_alone_is_trained(tmp_path):
    model = opened(write_folder(tmp_path / "model", SMALL))
    generator = torch.Generator().manual_seed(0)

    def view(name, weight):
        return LowRankView(weight, 4, 2.0, generator) if name == "layers.0.q" else None

    plain, adapted = BlockModel(model), BlockModel(model, view=view)
    ids = torch.arange(2 * 30).view(2, 30)
    assert torch.equal(plain(ids), adapted(ids))
    adapted(ids).square().mean().backward()
    trained = {n.rpartition(".")[2]: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert trained.keys() == {"down", "up"}
    assert trained["up"].grad.abs().max() > 0
    with torch.no_grad():
        trained["up"] += 1
    assert torch.equal(plain(ids), adapted(ids, bare=True))
    assert not torch.equal(plain(ids), adapted(ids))


def test_what_would_mean_nothing_is_refused(tmp_path, text, capsys):
    folder = write_folder(tmp_path / "model", SMALL)
    other = write_folder(tmp_path / "other", SMALL | {"vocab_size": 4100})
    model = opened(folder)
    with pytest.raises(SettingsError, match=r"4,096 and 4,100 tokens"):
        distill(model, opened(other), tmp_path / "out", QUICK, text)
    quantize(model, tmp_path / "int4", Recipe(method="rtn"), None)
    with pytest.raises(UnsupportedModelError, match="must be the model that it was made"):
        distill(
            opened(tmp_path / "int4"), opened(other.parent / "int4"), tmp_path / "o", QUICK, text
        )
    short = TrainingText(source="short", tokens=text.tokens[:20])
    with pytest.raises(SettingsError, match="fewer than a window"):
        distill(model, model, tmp_path / "short", QUICK, short)
    with pytest.raises(InvalidRequestError, match="training text"):
        text.check_apart([text.tokens[100:200]])
    words = ["distill", str(folder), "-o", str(tmp_path / "cli"), "--steps", "2", "--step-tokens",
             "128", "--micro-batch-tokens", "64", "--window-tokens", "64"]  # fmt: skip
    assert main([*words, "--top-k", "5", "--no-quality"]) == 2
    assert "--top-k has no effect without --teacher" in capsys.readouterr().err
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"text": "def f(x):\n    return x + 1\n"}))
    assert main([*words, "--teacher", str(folder), "--text", str(held)]) == 0
    told = capsys.readouterr().out
    assert "2 steps of 128 tokens" in told
    assert "weights alone, float32" in told
