"""``ridgeline probe`` and ``ridgeline batch``."""

import json

import pytest
from tests.server.running import running

from ridgeline.bench.serve.metrics import Quantile
from ridgeline.bench.serve.probe import LengthPoint, _line, saturation
from ridgeline.cli import main
from ridgeline.server import serving


def test_probe_measures_a_server(model_folder, tmp_path, capsys):
    with running(model_folder, data_dir=tmp_path) as server:
        options = ["--input-lens", "8,64", "--concurrency", "1,2", "--requests", "3",
                   "--max-token-id", "250"]  # fmt: skip
        code = main(["probe", server.url, *options, "--output-len", "8", "--json"])
    assert code == 0
    report = json.loads(capsys.readouterr().out)
    assert [point["input_tokens"] for point in report["lengths"]] == [8, 64]
    assert report["points"][0]["output_tokens_s"] > 0
    assert report["points"][0]["num_failed"] == 0


def test_prefill_speed_is_the_slope():
    points = [
        LengthPoint(input_tokens=n, ttft_s=Quantile(value=0.01 + n / 5000, low=None, high=None))
        for n in (10, 100, 1000)
    ]
    slope, overhead = _line(points)
    assert 1 / slope == pytest.approx(5000)
    assert overhead == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        # One noisy pair (100, 96) is no saturation: there is more at 4 and 8.
        ([[100, 99, 101], [96, 180, 190], [380, 370, 360], [700, 690, 710]], None),
        ([[100, 99, 101], [190, 200, 180], [350, 210, 360], [355, 365, 350]], (4, 4, 8)),
        ([[100, 99, 101], [190, 200, 180], [201, 199, 195], [202, 198, 200]], (2, 2, 4)),
        ([[0, 0, 0]] * 4, None),
    ],
)
def test_saturation_is_that_of_the_middle_of_the_rounds(outputs, found):
    it = saturation([1, 2, 4, 8], outputs)
    assert found == (None if it is None else (it.concurrency, it.low, it.high))


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
        ([line(0), line(0)], ", line 2: "),
        ([line(0) | {"url": "/v1/nothing"}], "url"),
        ([line(0), line(1) | {"method": "GET"}], ", line 2: "),
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


@pytest.mark.parametrize("has_tier", [True, False])
def test_one_key_file_is_for_the_data_folder_and_the_tier_on_disk(monkeypatch, has_tier):
    seen = []
    monkeypatch.setattr(serving, "serve", lambda *configs, **_: seen.extend(configs))
    tier = ["--kv-disk-tier-path", "kv"] if has_tier else []
    assert main(["serve", "--encryption-key-file", "key", *tier]) == 0
    engine, server = seen
    assert server.encryption_key_file == "key"
    assert engine.encryption_key_file == ("key" if has_tier else None)
