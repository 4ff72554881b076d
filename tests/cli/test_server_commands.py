"""``ridgeline probe`` and ``ridgeline batch``."""

import json

import pytest
from tests.server.running import running

from ridgeline.bench.serve.probe import LengthPoint, _line
from ridgeline.cli import main


def test_probe_measures_a_server(model_folder, tmp_path, capsys):
    with running(model_folder, data_dir=tmp_path) as server:
        options = ["--input-lens", "8,64", "--concurrency", "1,2", "--requests", "3",
                   "--max-token-id", "250"]  # fmt: skip
        code = main(["probe", server.url, *options, "--output-len", "8", "--weights-gb", "1",
                     "--json"])  # fmt: skip
    assert code == 0
    report = json.loads(capsys.readouterr().out)
    assert [point["input_tokens"] for point in report["lengths"]] == [8, 64]
    assert report["loads"][0]["output_tokens_s"] > 0
    assert report["loads"][0]["num_failed"] == 0
    tpot_s = report["loads"][0]["tpot_p50_s"]
    assert report["implied"]["bytes_per_s"] == pytest.approx(1e9 / tpot_s)


def test_prefill_speed_is_the_slope():
    points = [LengthPoint(input_tokens=n, ttft_s=0.01 + n / 5000) for n in (10, 100, 1000)]
    slope, overhead = _line(points)
    assert 1 / slope == pytest.approx(5000)
    assert overhead == pytest.approx(0.01)


def test_probe_of_nothing_is_one_sentence(capsys):
    assert main(["probe", "http://127.0.0.1:9"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def batch(folder, model, lines, *options):
    source = folder / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    output = str(folder / "out.jsonl")
    return main(["batch", str(source), str(model), "-o", output, "--json", *options])


def line(number, **body):
    body = {"prompt": "the cat", "max_tokens": 3, **body}
    return {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}


def test_batch_answers_each_line_once(model_folder, tmp_path, capsys):
    lines = [line(0), line(1), line(2, prompt="the " * 900), line(3, temperature="hot")]
    assert batch(tmp_path, model_folder, lines) == 1
    assert json.loads(capsys.readouterr().out) == {"completed": 2, "failed": 2}
    errors = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    assert sorted(json.loads(text)["custom_id"] for text in errors) == ["2", "3"]

    # A crash in the middle of a line: only that line is run again.
    output = tmp_path / "out.jsonl"
    whole = output.read_text()
    output.write_text(whole[: whole.rindex("{", 0, len(whole) - 2) - 5])
    kept = output.read_text().count("\n")
    assert batch(tmp_path, model_folder, lines) == 1
    assert json.loads(capsys.readouterr().out) == {"completed": 2, "failed": 2}
    rows = [json.loads(text)["custom_id"] for text in output.read_text().splitlines()]
    assert kept < 2
    assert sorted(rows) == ["0", "1"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no requests"),
        ([line(0), line(0)], "Line 2"),
        ([line(0) | {"url": "/v1/nothing"}], "url"),
        ([line(0), line(1) | {"method": "GET"}], "Line 2"),
    ],
)
def test_bad_batches_are_refused_before_the_model_loads(tmp_path, capsys, lines, words):
    assert batch(tmp_path, "no-such-model", lines) == 2
    assert words in capsys.readouterr().err


def test_the_input_is_not_taken_for_its_own_answers(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line(0)) + "\n")
    assert main(["batch", str(source), "no-such-model", "-o", str(source), "--json"]) == 2
    assert "into the input" in capsys.readouterr().err
