"""The honesty report's arithmetic, and that the test set is really held out."""

import pytest
from tests.roofline.test_fitting import samples

from ridgeline.bench.calibration import SHAPES, STEPS
from ridgeline.bench.honesty import cases
from ridgeline.bench.honesty.page import page
from ridgeline.bench.honesty.scoring import Baselines, Claim, Outcome, speed_ups, summarise
from ridgeline.bench.step_timing import StepShape

STEP = StepShape(batch_size=1, num_tokens=1, context=10)


def outcome(predicted, measured, *, form="a", step=STEP, low=0.8, high=1.2):
    claim = Claim(
        shape="s",
        format=form,
        step=step,
        predicted_s=predicted,
        low_s=predicted * low,
        high_s=predicted * high,
        baselines={"roofline": 0.5 * measured, "constant": measured * 1.3, "affine": measured},
    )
    return Outcome(claim=claim, measured_s=measured)


def test_a_shape_a_format_and_every_step_are_held_out():
    for executor in ("cpu", "reference"):
        models = cases.tested_models(executor)
        formats = cases.CALIBRATED_FORMATS[executor]
        assert cases.UNSEEN_FORMAT[executor] not in formats
        assert not set(cases.UNSEEN_SHAPES) & set(SHAPES)
        assert not set(cases.TEST_STEPS) & set(STEPS)
        assert len({shape for shape, _ in models}) >= 3
        assert len(models) * len(cases.TEST_STEPS) >= 80  # long ones are left out
        assert any(form == cases.UNSEEN_FORMAT[executor] for _, form in models)


def test_errors_coverage_and_bars():
    prefill = StepShape(batch_size=1, num_tokens=9, context=0)
    found = [
        outcome(1.0, 1.1),
        outcome(1.0, 1.0),
        outcome(1.0, 2.0),
        outcome(3.0, 3.0, step=prefill),
    ]
    result = summarise(found)
    decode = result["decode"]
    assert decode["median"] == pytest.approx(1 - 1 / 1.1)
    assert decode["worst"] == pytest.approx(0.5)
    assert decode["covered"] == pytest.approx(2 / 3)
    assert decode["baselines"]["roofline"] == pytest.approx(0.5)
    assert decode["held"]["half of the roofline's error"]
    assert not decode["held"]["better than an affine fit"]
    assert not decode["held"]["coverage"]
    assert result["prefill"]["count"] == 1


def test_speed_ups_compare_formats_on_one_step():
    result = speed_ups([outcome(2.0, 2.0, form="a"), outcome(1.0, 1.1, form="b")])
    assert result["count"] == 1
    assert result["median"] == pytest.approx(2.0 / (2.0 / 1.1) - 1)
    assert result["sign_right"] == 1.0


def test_baselines_are_fitted_on_the_same_samples():
    made = Baselines(samples(("gpt2",)))
    one = samples(("gpt2",))[0]
    found = made.predict(one.terms)
    assert 0 < found["roofline"] < found["constant"]


def test_the_page_keeps_failures():
    entry = {"flagged": False, "ratio": 1.0, "held": False}
    result = {
        "created": "2026-01-02T00:00:00",
        "machine": "box",
        "executor": "cpu",
        "seconds": 1.0,
        "contended": True,
        "calibrated": {"shapes": ["a"], "formats": ["b"]},
        "unseen": {"shapes": ["c"], "format": "d"},
        "count": 2,
        "steps": summarise([outcome(1.0, 2.0)]),
        "speed_ups": {},
        "ttft": [{"load": 0.5, "predicted_s": 1.0, "measured_s": 2.0, "error": 0.5, "held": False}],
        "a_a": {"count": 20, "false": 5, "held": False},
        "lies": {"a slowed kernel": entry},
        "ceiling_drift": 0.9,
    }
    text = page(result)
    assert "not median" in text
    assert "Other processes" in text
    assert "| a slowed kernel | 1.00 | no |" in text
    assert "not held" in text
