"""``ridgeline cost``: the published figures that docs/planning.md names, by its commands."""

import json

import pytest

from ridgeline.cli.main import main


def run(capsys, text):
    code = main(["cost", *text.split()])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--usd-per-hour 2 --output-tok-s 100", "$5.556 per 1M output tokens"),
        ("--usd-per-hour 2 --output-tok-s 100 --output 200", "$1.111 per 1K requests, decode"),
        ("--usd-per-hour 2 --prefill-rpm 100", "$0.333 per 1K requests, prefill"),
        (
            "--usd-per-hour 2 --output-tok-s 100 --output 200 --prefill-rpm 100",
            "$1.444 per 1K requests",
        ),
        ("--hardware v100 --batch-ms 3.8", "$2.618 per 1M batches"),
        ("--hardware tpu-v3 --batch-ms 1.7", "$2.125 per 1M batches"),
        ("--output-tok-s 42.23 --tpot-ms 88.8", "3.75 sequences in progress"),
        ("--usd-per-hour 3.6 --api-usd-per-1m 0.5", "2,000 output tok/s"),
        ("--cache-gb 100 --usd-per-gb-month 0.08", "$8.00 to keep the cache"),
    ],
)
def test_published_figures(capsys, options, line):
    code, out, _ = run(capsys, options)
    assert code == 0
    assert any(each.startswith(line) for each in out.splitlines())


def test_a_break_even_beyond_the_rate_is_said(capsys):
    options = "--usd-per-hour 3.6 --api-usd-per-1m 0.5 --output-tok-s"
    assert "80% of the rate\n" in run(capsys, f"{options} 2500")[1]
    assert "200% of the rate, so it is dearer than the API" in run(capsys, f"{options} 1000")[1]


def test_an_owned_machine_pays_for_its_power_and_its_idle_hours(capsys):
    """$26,280 over three years are $1 an hour; 1 kW at $0.10 with cooling of 1.3 are $0.13."""
    owned = "--purchase-usd 26280 --lifetime-years 3 --power-w 1000 --usd-per-kwh 0.1 --json"
    assert json.loads(run(capsys, owned)[1])["usd_per_hour"] == pytest.approx(1.13)
    idle = json.loads(run(capsys, f"{owned} --busy-share 0.5")[1])
    assert idle["usd_per_hour"] == pytest.approx(2.26)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--hardware mi300x --output-tok-s 100",
        "--usd-per-hour 0 --output-tok-s 100",
        "--usd-per-hour 2 --purchase-usd 5",
        "--usd-per-hour 2 --usd-per-kwh 0.1",
        "--usd-per-hour 2 --busy-share 2",
        "--purchase-usd 10000",
        "--purchase-usd 10000 --power-w 100 --cooling 0.5",
        "--tpot-ms 10",
        "--cache-gb 10",
    ],
)
def test_mistakes_are_one_line(capsys, options):
    code, out, err = run(capsys, options)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
