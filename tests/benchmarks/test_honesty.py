"""The honesty report's arithmetic, and that the test set is really held out."""

from dataclasses import replace

import msgspec
import pytest
from benchmarks.honesty import cases, lies, report
from benchmarks.honesty.measured import (
    SCHEMA,
    Measurements,
    ModelTimes,
    TrafficTimes,
    load,
    save,
)
from benchmarks.honesty.page import page
from benchmarks.honesty.scoring import (
    Baselines,
    Claim,
    Outcome,
    false_wins,
    is_win,
    speed_ups,
    summarise,
)
from tests.roofline.test_fitting import CEILINGS
from tests.roofline.test_kernels import VECTORS

from ridgeline.bench.calibration import SHAPES, STEPS
from ridgeline.bench.step_timing import StepShape, StepTimes
from ridgeline.core.errors import CorruptFileError
from ridgeline.planning import Arrival
from ridgeline.roofline import make_batch
from ridgeline.roofline.features import roof_seconds

STEP = StepShape(batch_size=1, num_tokens=1, context=10)


@pytest.fixture(autouse=True)
def same_kernels(monkeypatch):
    """Whatever machine this is, the made-up one has the kernels of one."""
    monkeypatch.setattr("ridgeline.executors.cpu.pricing.native_kernels", lambda: VECTORS)


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


def test_baselines_are_fitted_on_the_same_steps():
    made = Baselines([1.0, 2.0, 4.0], [3.0, 5.0, 9.0])
    found = made.predict(8.0)
    assert found["roofline"] == 8.0
    assert found["constant"] == pytest.approx(20.0)
    assert found["affine"] == pytest.approx(17.0)


def test_what_differs_from_itself_is_a_false_win():
    def measured(*visits):
        return StepTimes(shape="s", format="a", step=STEP, visits_s=tuple((v,) for v in visits))

    pairs = [
        (measured(1.0, 1.1), measured(1.04, 1.2)),  # within 5 %
        (measured(1.0, 1.3), measured(1.2, 1.1)),  # visits lie among each other
        (measured(1.0, 1.1), measured(1.3, 1.2)),
    ]
    assert [is_win(*pair) for pair in pairs] == [False, False, True]
    assert [is_win(*reversed(pair)) for pair in pairs] == [False, False, True]
    assert false_wins(pairs) == {"count": 3, "false": 1, "held": False}


def times(shape, form, step, seconds):
    return StepTimes(shape=shape, format=form, step=step, visits_s=((seconds,) * 3, (seconds,) * 3))


def made_up_run():
    """A run in which every step took twice what the roof allows, and 1 ms."""
    ceilings = CEILINGS

    def model_times(shape, form, steps):
        model = report.priced("cpu", shape, form)
        measured = [
            times(
                shape,
                form,
                step,
                1e-3 + 2 * roof_seconds(model, make_batch(step.ranges), ceilings),
            )
            for step in steps
        ]
        return ModelTimes(shape=shape, format=form, times=tuple(measured))

    lie = tuple(times("wide", "bfloat16", step, 0.5) for step in cases.TEST_STEPS[:3])
    return Measurements(
        schema=SCHEMA,
        created="2026-01-02T00:00:00+00:00",
        executor="cpu",
        ceilings=ceilings,
        host_step_s=1e-4,
        host_segment_s=1e-6,
        calibration=tuple(
            model_times(shape, form, STEPS) for form in ("float32", "int8") for shape in SHAPES
        ),
        tests=tuple(
            model_times(shape, form, cases.TEST_STEPS[::3])
            for shape, form in cases.tested_models("cpu")[:3]
        ),
        lies={"a slowed kernel": lie},
        traffic=(
            TrafficTimes(
                load=0.5,
                shape="tall",
                format="bfloat16",
                arrivals=(Arrival(arrival_s=0.0, prompt_tokens=20, output_tokens=3),),
                visits_s=((0.1,), (0.2,)),
            ),
        ),
        memory_rates=(19e9, 20e9),
        seconds=1.0,
    )


def test_lies_are_flagged_and_the_truth_is_not():
    run = made_up_run()
    calibration = report.calibration_of(run, report.calibration_samples(run))
    small = judged(calibration, lies.CACHED, "cached", "float32", scale=0.4)
    assert (small["flagged"], small["held"]) == (True, True)
    slow = judged(calibration, lies.CACHED, "cached", "float32", scale=3.0)
    assert (slow["flagged"], slow["held"]) == (False, False)  # not faster than memory allows
    assert judged(calibration, "a slowed kernel", "wide", "int8", scale=2.0)["held"]
    assert judged(calibration, lies.HONEST, "wide", "int8", scale=1.0)["held"]
    assert not judged(calibration, lies.HONEST, "wide", "int8", scale=2.0)["held"]


def test_lies_are_judged_beside_what_is_true_on_a_machine_that_has_changed():
    run = made_up_run()
    calibration = report.calibration_of(run, report.calibration_samples(run))
    step = cases.TEST_STEPS[0]
    seconds = lies.predicted_s(times("wide", "int8", step, 1.0), calibration)
    measured = {
        name: (times("wide", "int8", step, scale * seconds),)
        for name, scale in (("a core removed", 1.0), ("harmless", 0.5), (lies.HONEST, 0.5))
    }
    found = lies.judge_lies(measured, calibration, drift=0.5)
    assert {name: each["flagged"] for name, each in found.items()} == {
        "a core removed": True, "harmless": False, lies.HONEST: False,
    }  # fmt: skip
    assert lies.judge_lies(measured, calibration)[lies.HONEST]["flagged"]


def judged(calibration, name, shape, form, *, scale):
    """One step that took ``scale`` times what is predicted, of weights in main memory."""
    step = cases.TEST_STEPS[0]
    ceilings = replace(calibration.ceilings, levels=calibration.ceilings.levels[-1:])
    honest = msgspec.structs.replace(calibration, ceilings=ceilings)
    seconds = scale * lies.predicted_s(times(shape, form, step, 1.0), honest)
    return lies.judge_lies({name: (times(shape, form, step, seconds),)}, calibration)[name]


def test_a_report_is_made_from_measurements_alone(tmp_path):
    run = made_up_run()
    path = tmp_path / "m.json"
    save(run, path)
    assert load(path) == run
    result = report.report(load(path))
    assert result["steps"]["decode"]["median"] < 0.15
    assert result["lies"]["a slowed kernel"]["flagged"]
    assert result["by_kind"].keys() == {"mixed", "verification"}
    assert all(each["count"] == 3 and each["median"] < 0.15 for each in result["by_kind"].values())
    assert "| mixed | 3 | " in page(result | {"replayed": False})
    assert result["a_a"] == {"count": 21, "false": 0, "held": True}
    text = page(result | {"replayed": True})
    assert "| tall bfloat16 | new shape and new format |" in text
    assert "made again" in text


def test_a_machine_that_slows_down_is_told_from_a_wrong_prediction():
    run = made_up_run()
    slow = tuple(slowed(each, 1.5) for each in run.tests)
    again = tuple(slowed(each, 1.5) for each in run.calibration[-2:])
    result = report.report(msgspec.structs.replace(run, tests=slow, repeated=again))
    assert result["drift"] == pytest.approx({"decode": 1.5, "prefill": 1.5})
    for phase, before in report.report(run)["steps"].items():
        assert result["steps"][phase]["median"] > 0.25
        assert result["corrected"][phase]["median"] == pytest.approx(before["median"])
        assert result["corrected"][phase]["covered"] == before["covered"]
    text = page(result | {"replayed": False})
    assert "took 1.50 (decode) and 1.50 (prefill) of the seconds of before" in text


def test_a_machine_that_slows_down_later_is_told_from_a_wrong_simulation_and_from_a_lie():
    run = made_up_run()
    calibration = report.calibration_of(run, report.calibration_samples(run))
    again = slowed(run.calibration[-1], 1.5)
    (traffic,) = run.traffic
    predicted_s = report.predicted_ttft(traffic, calibration)
    traffic = msgspec.structs.replace(traffic, visits_s=((1.5 * predicted_s,),), again=again)
    seconds = 1.5 * lies.predicted_s(times("wide", "int8", STEPS[1], 1.0), calibration)
    told = {lies.HONEST: (times("wide", "int8", STEPS[1], seconds),)}
    beside = {lies.AGAIN: again.times}
    (entry,) = report.report(msgspec.structs.replace(run, traffic=(traffic,)))["ttft"]
    assert entry["error"] == pytest.approx(1 / 3, rel=0.01)
    assert entry["corrected_error"] == pytest.approx(0.0, abs=0.01)
    alone = report.report(msgspec.structs.replace(run, lies=told))["lies"]
    assert alone[lies.HONEST]["flagged"]
    found = report.report(msgspec.structs.replace(run, lies=told | beside))["lies"]
    assert not found[lies.HONEST]["flagged"]
    assert lies.AGAIN not in found


def slowed(model, factor):
    """The same steps, which took ``factor`` times as long."""
    longer = [
        replace(each, visits_s=tuple(tuple(s * factor for s in visit) for visit in each.visits_s))
        for each in model.times
    ]
    return msgspec.structs.replace(model, times=tuple(longer))


def test_measurements_of_something_else_are_refused(tmp_path):
    path = tmp_path / "m.json"
    path.write_text('{"schema": 2}')
    with pytest.raises(CorruptFileError):
        load(path)
    save(msgspec.structs.replace(made_up_run(), schema=99), path)
    with pytest.raises(CorruptFileError, match="version 99"):
        load(path)


def test_the_page_keeps_failures():
    entry = {"flagged": False, "ratio": 1.0, "held": False}
    result = {
        "created": "2026-01-02T00:00:00",
        "machine": "box",
        "executor": "cpu",
        "seconds": 1.0,
        "contended": True,
        "drift": {},
        "replayed": False,
        "calibrated": {"shapes": ["a"], "formats": ["b"], "count": 9},
        "unseen": {"shapes": ["c"], "format": "d"},
        "count": 2,
        "steps": summarise([outcome(1.0, 2.0)]),
        "speed_ups": {},
        "by_model": {},
        "by_kind": {},
        "outcomes": [],
        "memory": {"claimed": 2.0, "rounds": [1.0, 2.0]},
        "ttft": [
            {
                "load": 0.5,
                "requests": 3,
                "visits_s": [2.0, 3.0],
                "predicted_s": 1.0,
                "measured_s": 2.0,
                "error": 0.5,
                "held": False,
                "corrected_s": None,
                "corrected_error": None,
            }
        ],
        "a_a": {"count": 20, "false": 5, "held": False},
        "lies": {"a slowed kernel": entry},
    }
    text = page(result)
    assert "not median" in text
    assert "Other processes" in text
    assert "| a slowed kernel | 1.00 | **no** |" in text
    assert "not held" in text
