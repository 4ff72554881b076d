"""Bits by sensitivity: what is predicted, what is chosen, and what is written."""

import itertools
import json
import random

import pytest
import torch
from tests.compress.folders import BIASED, EXPERTS, FUSED, LATENT, SMALL, write_folder
from tests.compress.test_quantize import digests, made, stored, text_of

from ridgeline import LLM
from ridgeline.compress import quantize as quantizing
from ridgeline.compress.block_forward import BlockForward
from ridgeline.compress.gptq import round_nearest
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.mixing import Unit, allocate, sensitivities
from ridgeline.compress.output import MANIFEST_NAME
from ridgeline.compress.recipe import Recipe
from ridgeline.compress.tensors import plan_tensors
from ridgeline.core.errors import SettingsError, UnsupportedModelError
from ridgeline.quant import QuantizedTensor
from ridgeline.weights import Checkpoint

FIVE = Recipe(bits_per_weight=5.5)


def unit(size, kl):
    return Unit(weights=frozenset(), size=size, kl=kl, bits={bits: bits * size for bits in kl})


def test_no_other_choice_of_equal_bits_is_much_better():
    rng = random.Random(0)
    for _ in range(50):
        units = [
            unit(rng.randint(1, 9), {b: scale * 4.0**-b for b in (4, 5, 6, 8)})
            for scale in [rng.lognormvariate(0, 2) for _ in range(6)]
        ]
        size = sum(each.size for each in units)
        budget = rng.uniform(4, 8)
        chosen = allocate(units, budget)
        fits = [
            (sum(u.kl[b] for u, b in zip(units, c, strict=True)), c)
            for c in itertools.product((4, 5, 6, 8), repeat=6)
            if sum(u.bits[b] for u, b in zip(units, c, strict=True)) <= budget * size
        ]
        found = sum(u.kl[b] for u, b in zip(units, chosen, strict=True))
        assert tuple(chosen) in {c for _, c in fits}
        assert found <= 1.5 * min(fits)[0]


def test_too_few_bits_are_told():
    with pytest.raises(SettingsError, match=r"bits_per_weight is 3; the fewest bits here are 4\.0"):
        allocate([unit(10, {4: 1.0, 5: 0.5})], 3)


@pytest.mark.parametrize(
    ("config", "least"),
    [(SMALL, 0.5), (BIASED, 0.5), (FUSED, 0.5), (EXPERTS, 0.2), (LATENT, 0.2)],
)
def test_the_prediction_is_the_measured_divergence(config, least, tmp_path):
    """Of rounding every matrix, and of rounding one unit alone. That rounding has other experts
    chosen is not predicted, and these have random routers."""
    model = LayeredModel.open(str(write_folder(tmp_path / "model", config)))
    windows = text_of(model).windows
    with Checkpoint(model.stored.path) as checkpoint:
        plan = plan_tensors(model, checkpoint, lambda _, columns: FIVE.grid(columns))
    units = sensitivities(model, plan, FIVE, windows)
    assert frozenset().union(*(each.weights for each in units)) == plan.quantized
    weights = {k: w for run in range(len(model.runs)) for k, w in model.weights(run).items()}
    some_ops = [op for run in model.runs for op in run]

    def divergence(names):
        rounded = dict(weights)
        for name in names:
            grid, matrix = FIVE.grid(weights[name].shape[-1], 5), weights[name]
            flat = round_nearest(matrix.reshape(-1, matrix.shape[-1]), grid, None)
            rounded[name] = flat.values_OI.reshape(matrix.shape)
        total = 0.0
        for window in windows:
            logits = []
            for each in (weights, rounded):
                forward = BlockForward(each, [window])
                forward.run(some_ops)
                logits.append(forward.buffers["logits"].log_softmax(-1))
            total += float((logits[0].exp() * (logits[0] - logits[1])).sum())
        return total / sum(map(len, windows))

    with torch.no_grad():
        measured = divergence(plan.quantized)
        assert least < sum(each.kl[5] for each in units) / measured < 2
        most = max(units, key=lambda each: each.kl[5])
        assert least < most.kl[5] / divergence(most.weights) < 2


@pytest.mark.parametrize("config", [SMALL, FUSED, EXPERTS])
def test_a_file_of_several_bits_is_read_back_and_runs(config, tmp_path):
    out = tmp_path / "out"
    made(write_folder(tmp_path / "model", config), out, FIVE)
    matrices = [w for w in stored(out).values() if isinstance(w, QuantizedTensor)]
    bits = {each.format.bits for each in matrices}
    assert len(bits) > 1
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    groups = config["config_groups"].values()
    assert {each["weights"]["num_bits"] for each in groups} == bits
    targets = [name for each in groups for name in each["targets"]]
    assert len(targets) == len(set(targets))
    tokens = list(range(5, 40))
    with LLM(str(out), executor="reference", dtype="float32") as wanted:
        expected = wanted.logits(tokens)
    with LLM(str(out), dtype="float32") as llm:
        assert abs(llm.logits(tokens) - expected).mean() < 0.1 * abs(expected).mean()


def test_more_bits_are_closer(tmp_path):
    folder = write_folder(tmp_path / "model")
    tokens = list(range(5, 60))
    with LLM(str(folder), executor="reference", dtype="float32") as llm:
        wanted = llm.logits(tokens)
    errors = []
    for bits in (4.5, 5.5, 8.5):
        out = tmp_path / f"out-{bits}"
        report = made(folder, out, Recipe(bits_per_weight=bits))
        assert report.bits_per_weight <= bits
        with LLM(str(out), executor="reference", dtype="float32") as llm:
            errors.append(abs(llm.logits(tokens) - wanted).mean())
    assert errors == sorted(errors, reverse=True)


def test_what_was_chosen_is_kept_for_a_run_that_goes_on(tmp_path, monkeypatch):
    folder, whole, half = write_folder(tmp_path / "model"), tmp_path / "whole", tmp_path / "half"
    made(folder, whole, FIVE)

    def stop(done, total, label):
        if label.startswith("layer 1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(folder, half, FIVE, progress=stop)
    monkeypatch.setattr(quantizing, "choose_bits", lambda *_: pytest.fail("chosen again"))
    made(folder, half, FIVE, resume=True)
    assert digests(half) == digests(whole)
    assert json.loads((half / MANIFEST_NAME).read_text())["kept"]["bits"]


def test_training_in_several_bits_is_refused(tmp_path):
    from ridgeline.compress.qat import recipe_of

    made(write_folder(tmp_path / "model"), tmp_path / "out", FIVE)
    with pytest.raises(UnsupportedModelError, match="matrices of several bits"):
        recipe_of(tmp_path / "out")
