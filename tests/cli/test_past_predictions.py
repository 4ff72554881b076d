"""Beside each prediction stands how far off past ones were here."""

import pytest

from ridgeline.cli import main

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
