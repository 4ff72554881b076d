import json
from xml.etree import ElementTree

import pytest
from tests.roofline.test_fitting import CEILINGS, samples

from ridgeline.cli.main import main
from ridgeline.executors import default_executor
from ridgeline.roofline.calibration import calibrate, calibration_path, save


def run(capsys, *arguments):
    code = main(["roofline", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_catalogue_device(capsys, tmp_path):
    svg = tmp_path / "roof.svg"
    options = ("--shape", "llama-3.1-8b", "--hardware", "h100", "--json", "--svg", str(svg))
    code, out, _ = run(capsys, *options)
    assert code == 0
    result = json.loads(out)
    assert result["measured"] is False
    assert result["ceilings"]["ridge"] == pytest.approx(989e12 / 3.35e12)
    bounds = {point["name"]: point["bound"] for point in result["points"]}
    assert bounds["decode B=1 C=512"] == "memory"
    assert bounds["prefill S=2048"] == "compute"
    assert all(point["gap"] >= 1 for point in result["points"])
    gains = {each["change"]: each["gain"] for each in result["advice"]}
    assert 2 < gains["quantize weights to int4"] < 4
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_decode_is_about_one_flop_a_byte(capsys):
    _, out, _ = run(capsys, "--shape", "llama-2-7b", "--hardware", "a100", "--batch", "1", "--json")
    first = json.loads(out)["points"][0]
    assert first["intensity"] == pytest.approx(1.0, rel=0.1)


def test_this_machine_from_its_file(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    executor = default_executor()
    calibration = calibrate(samples(), CEILINGS, executor=executor, dense_attention=False)
    save(calibration, calibration_path(executor))
    code, out, err = run(capsys, "--shape", "qwen2.5-0.5b", "--datasheet", "epyc-9654")
    assert code == 0, err
    assert "ridge" in out
    assert "Measured" in out
    assert "FLOPs/byte" in out


@pytest.mark.parametrize(
    "options",
    [
        ("--hardware", "abacus"),
        ("--hardware", "l4", "--datasheet", "abacus"),
        ("--hardware", "l4", "--shape", "gpt2", "--context", "100000"),
    ],
)
def test_mistakes_are_one_line(capsys, options):
    code, out, err = run(capsys, *options)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
