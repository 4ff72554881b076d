"""Beside each prediction stands how far off past ones were here, and it stays as good."""

from dataclasses import replace

import msgspec
import pytest

from ridgeline.bench import calibration
from ridgeline.bench.conditions import Watch
from ridgeline.cli import main
from ridgeline.roofline.calibration import calibration_path, load

SAID = (
    "Past predictions here, decode of bfloat16: median 12%, p90 30%, steps took × 1.10 of the "
    "prediction (1 run)."
)
SHAPE = ("--shape", "qwen2.5-0.5b")


@pytest.mark.parametrize(
    "words",
    [
        ("roofline", *SHAPE),
        ("rank", "qwen2.5-0.5b"),
        ("plan", *SHAPE, "--output", "20"),
        ("plan", *SHAPE, "--layouts"),
        ("plan", *SHAPE, "--disaggregate", "--slo", "ttft=100,tpot=10"),
        ("plan", "--place", "qwen2.5-0.5b"),
    ],
)
def test_a_prediction_says_how_far_off_past_ones_were(predicted_before, capsys, words):
    assert main(list(words)) == 0
    assert SAID in " ".join(capsys.readouterr().out.split())


def test_machines_of_the_catalogue_have_no_past(predicted_before, capsys):
    assert main(["rank", "qwen2.5-0.5b", "--hardware", "l4"]) == 0
    assert "Past predictions" not in capsys.readouterr().out


def test_a_calibration_that_others_disturbed_says_so_as_it_is_made(
    predicted_before, capsys, monkeypatch
):
    quiet = load(calibration_path("cpu"))
    ceilings = replace(quiet.ceilings, conditions={"contended": True, "others_share": 0.4})
    made = msgspec.structs.replace(quiet, ceilings=ceilings)
    monkeypatch.setattr(calibration, "calibrate_here", lambda *_, **__: made)
    calibration_path("cpu").unlink()
    assert main(["roofline", *SHAPE, "--executor", "cpu"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "The calibration is kept, but other processes took 40% of the processors" in said
    assert "--calibrate measures anew" in said


@pytest.mark.parametrize("has_rounds", [True, False])
def test_an_interrupted_calibration_says_what_is_kept(
    predicted_before, capsys, monkeypatch, has_rounds
):
    def interrupted(*_, kept_path, **__):
        if has_rounds:
            kept_path.write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "calibrate_here", interrupted)
    calibration_path("cpu").unlink()
    assert main(["optimize", "--budget", "10s"]) == 130
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("This machine is calibrated first, which the --budget does not count. ")
    assert "If it is interrupted its whole rounds are kept" in said
    told = "The rounds so far are kept." if has_rounds else "No round was whole: nothing is kept."
    assert said.endswith(f"Stopped. {told}")


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_a_calibration_is_not_replaced_by_one_that_was_begun_under_load(
    predicted_before, capsys, monkeypatch, share
):
    monkeypatch.setattr(Watch, "others_share", lambda _: share)
    monkeypatch.setattr(
        calibration, "calibrate_here", lambda *_, **__: load(calibration_path("cpu"))
    )
    words = ["roofline", *SHAPE, "--executor", "cpu", "--calibrate"]
    assert main(words) == (2 if share > 0.25 else 0)
    assert ("Other processes take 50%" in capsys.readouterr().err) == (share > 0.25)
