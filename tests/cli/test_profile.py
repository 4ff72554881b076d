"""``ridgeline profile`` on the embedded model and on shapes."""

import json
from xml.etree import ElementTree

import pytest

from ridgeline.cli.main import main

FAST = ("--rounds", "1", "--steps", "4", "--max-model-len", "640")
OP_KEYS = {
    "name", "layer", "count", "seconds", "share", "work_s", "wait_s", "serial_s", "num_bytes",
    "flops", "bytes_per_s", "flops_per_s", "ceiling_bytes_per_s", "ceiling_flops_per_s", "roof_s",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_long_ceilings(monkeypatch):
    """Loops of a millisecond: rates are beside the point here."""
    monkeypatch.setattr("ridgeline.bench.ceilings._SAMPLE_S", 1e-3)
    monkeypatch.setattr("ridgeline.bench.ceilings._MIN_DRAM_BYTES", 8 << 20)
    monkeypatch.setattr("ridgeline.bench.ceilings._DRAM_TIMES_L3", 1)


def profiled(capsys, *arguments):
    code = main(["profile", *FAST, *arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


@pytest.mark.parametrize(
    "case", [(), ("--batch", "8", "--context", "32"), ("--prompt", "512")], ids=str
)
def test_all_seconds_of_the_embedded_model_are_told(capsys, case):
    result = json.loads(profiled(capsys, "--json", *case))
    assert result["sum_s"] == pytest.approx(result["seconds"], rel=0.03)
    assert result["num_tokens"] == {"--batch": 8, "--prompt": 512}.get((*case, "")[0], 1)
    for row in result["ops"]:
        assert row.keys() == OP_KEYS
        parts = row["work_s"] + row["wait_s"] + row["serial_s"]
        assert parts == pytest.approx(row["seconds"])
        assert row["wait_s"] >= -1e-6
    assert {row["name"] for row in result["ops"]} >= {"Embed", "MLP", "Head", "Sample"}
    assert result["unrecorded_s"] > 0
    assert result["ceilings"]["memory_bytes_per_s"] > 0


def test_a_table_and_files(capsys, tmp_path):
    trace, svg = tmp_path / "trace.json", tmp_path / "step.svg"
    out = profiled(capsys, "--per-layer", "--trace", str(trace), "--svg", str(svg))
    assert max(map(len, out.splitlines())) <= 100
    assert "MLP 4" in out
    assert "All rows are" in out
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"MLP", "thread_name", "Sample"}
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--batch", "0"), "--batch must be at least 1"),
        (("--shape", "no-such"), "Unknown shape"),
        (("--prompt", "99999"), "99999"),
        (("--executor", "simulated"), "executor"),
    ],
)
def test_what_cannot_be_profiled(capsys, arguments, problem):
    assert main(["profile", *FAST, *arguments]) == 2
    assert problem in capsys.readouterr().err
