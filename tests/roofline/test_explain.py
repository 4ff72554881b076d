"""What advice may promise."""

from dataclasses import replace

import msgspec
import pytest

from ridgeline.core.formats import BFLOAT16, FLOAT32
from ridgeline.core.plan import ModelRole
from ridgeline.models import PRESETS, describe, lower
from ridgeline.roofline import explain
from ridgeline.roofline.batch import decode_batch, prefill_batch
from ridgeline.roofline.calibration import typical
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.predict import StepPredictor
from ridgeline.roofline.price import pass_work


@pytest.fixture
def predictor():
    spec = describe(dict(PRESETS["llama-3.1-8b"])).spec
    model = PricedModel(spec=spec, ops=lower(spec), activations=FLOAT32)
    calibration = typical(load_catalogue().device("h100").ceilings())
    return StepPredictor({ModelRole.TARGET: model}, calibration)


def advised(predictor):
    wide = predictor.models[ModelRole.TARGET]
    narrow = explain.FormatChange(
        change="narrow", how="--dtype bfloat16", model=replace(wide, activations=BFLOAT16)
    )
    found = explain.advise(predictor, batch_size=1, context=512, max_batch=8, variants=[narrow])
    sizes = [pass_work(each, decode_batch(1, 512)).num_bytes for each in (wide, narrow.model)]
    return {each.change: each for each in found}, sizes[0] / sizes[1]


def test_no_format_is_promised_more_than_its_bytes(predictor, monkeypatch):
    """Nor within the interval: here the kernel of the narrow one is predicted ten times as fast."""
    before, ratio = advised(predictor)
    assert before["narrow"].low < before["narrow"].gain < before["narrow"].high

    def faster(predictor, model):
        calibration = msgspec.structs.replace(predictor.calibration, level=0.1)
        return StepPredictor({ModelRole.TARGET: model}, calibration)

    monkeypatch.setattr(explain, "_with", faster)
    narrow = advised(predictor)[0]["narrow"]
    assert narrow.gain == narrow.high == pytest.approx(ratio)


def test_the_roof_of_a_pass_is_that_of_its_ops(predictor):
    peak = explain.product_peak(predictor.models[ModelRole.TARGET], predictor.calibration)
    ridge = peak / predictor.calibration.ceilings.memory.bytes_per_s
    alone, many, _ = points = explain.points(predictor, [1, 256], [2048])
    assert alone.roof_flops_per_s == pytest.approx(alone.intensity / ridge * peak, rel=0.02)
    assert many.intensity > ridge and many.flops_per_s < many.roof_flops_per_s < 0.9 * peak
    assert not any("beyond the ridge" in each for each in explain.sentences(predictor, points))
    slow = [replace(many, bound=explain.Bound.MEMORY)]  # as kernels of attention may be
    (line,) = (each for each in explain.sentences(predictor, slow) if "beyond the ridge" in each)
    assert line.startswith("decode B=256 C=2048 has") and "Attend has" in line
    prompt = replace(points[2], bound=explain.Bound.MEMORY)
    (line,) = (e for e in explain.sentences(predictor, [prompt]) if "beyond the ridge" in e)
    of_prompt = {each.name: each.intensity for each in explain.ops(predictor, prefill_batch(2048))}
    name, intensity = line.rstrip(".").rpartition("other, and ")[2].split(" has ")
    assert intensity == f"{of_prompt[name]:.1f}"  # of one prompt, not of 2,048 sequences


def test_all_advice_has_an_interval_within_what_the_roof_gives(predictor):
    found, _ = advised(predictor)
    assert len(found) == 4
    for each in found.values():
        assert each.low <= each.gain <= each.high
    assert found["batch 8 instead of 1"].high <= 8
    assert found["50% of the prompt found in the prefix cache"].high <= 2.1


def test_each_level_of_memory_has_a_ridge(predictor):
    model, calibration = predictor.models[ModelRole.TARGET], predictor.calibration
    found = explain.ridges(model, calibration)
    (sentence, *_) = explain.sentences(predictor, explain.points(predictor, [1], [512]))
    for level in calibration.ceilings.levels:
        peak = explain.product_peak(model, calibration)
        assert found[level.name] == peak / level.bytes_per_s
        assert f"{found[level.name]:.1f}" in sentence
        assert level.name in sentence
