import json
from contextlib import nullcontext

import pytest

from ridgeline.cli import bench_serve, main


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("think-s", "nan"),
        ("think-s", "inf"),
        ("think-s", "-1"),
        ("warmup", "-1"),
        ("num-requests", "0"),
        ("num-requests", "1000001"),
        ("turns", "0"),
        ("prefix-len", "-1"),
        ("num-prefixes", "0"),
    ],
)
def test_what_is_out_of_bounds_is_one_error_before_anything_runs(capsys, option, value):
    assert main(["bench", "serve", "nowhere", f"--{option}", value]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--{option} must be between " in line


def test_how_far_a_load_is_is_shown(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(
        bench_serve, "loading_bar", lambda **_: nullcontext(lambda *each: shown.append(each))
    )
    options = ["--concurrency", "2", "--num-requests", "3", "--output-len", "2"]
    assert main(["bench", "serve", "--in-process", "--input-len", "4", *options]) == 0
    told = [each for each in shown if each[2] == "concurrency 2"]
    assert told == [(done, 3, "concurrency 2") for done in (1, 2, 3)]


def test_a_sweep_is_written_as_one_page(capsys, tmp_path):
    page = tmp_path / "load.html"
    options = ["bench", "serve", "--in-process", "--concurrency", "1,2", "--num-requests", "4"]
    options += ["--input-len", "8", "--output-len", "4", "--slo", "ttft=5", "--html", str(page)]
    assert main([*options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    text = page.read_text()
    assert text.count("<svg") == 3
    assert text.count("2 at once") >= 3
    embedded = text.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(embedded) == report
    assert main(options) == 2
    assert "is there already" in capsys.readouterr().err
