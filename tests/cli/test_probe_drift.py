"""``ridgeline probe --reference``: a planted format, another model, endpoints that tell less."""

import json

import numpy as np
import pytest
from tests.cli.test_probe import endpoint
from tests.server.running import running

from ridgeline.bench.serve import drift
from ridgeline.cli import main
from ridgeline.evaluation import log_softmax

OPTIONS = ("--questions", "6", "--output-len", "16", "--formats", "bfloat16,int4", "--json")


def report_of(capsys, url, *options):
    code = main(["probe", url, "--reference", "embedded", *OPTIONS, *options])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else captured.err


@pytest.mark.parametrize(
    ("quantization", "prompts", "nearest"),
    [(None, "ids", "bfloat16"), ("int4", "ids", "int4"), ("int4", "chat", "int4")],
)
def test_a_planted_format_is_found(tmp_path, capsys, quantization, prompts, nearest):
    engine = {"dtype": "bfloat16", "block_tokens": 16, "quantization": quantization}
    with running(None, data_dir=tmp_path, engine=engine) as server:
        code, report = report_of(capsys, server.url, "--prompts", prompts, "--claim", "bfloat16")
    assert report["nearest"] == nearest
    assert report["refuted"] == (quantization == "int4")
    assert code == report["refuted"]
    assert report["positions"] > 60


def test_another_model_is_further_than_every_format(model_folder, tmp_path, capsys):
    with running(model_folder, data_dir=tmp_path) as server:
        code, said = report_of(capsys, server.url, "--prompts", "text")
    assert (code == 0 and said["further_than_all"]) or "another vocabulary" in said


@pytest.mark.parametrize(
    "answer", ['{"choices": [{"text": "a", "logprobs": null}]}', '{"choices": []}', "[]"]
)
def test_an_endpoint_that_tells_none_is_one_sentence(capsys, monkeypatch, answer):
    async def ask(*_):
        return answer.encode()

    monkeypatch.setattr("ridgeline.bench.serve.http_target.HttpTarget.ask", ask)
    with endpoint(lambda *_: (500, "")) as url:
        code, said = report_of(capsys, url, "--prompts", "ids")
    assert code == 1
    assert said.startswith("error: ") and said.count("\n") == 1


def test_the_divergence_is_a_lower_bound_of_that_over_all_tokens():
    random = np.random.default_rng(0)
    wanted, said = (log_softmax(random.normal(size=(20, 50)) * 2) for _ in range(2))
    whole = (np.exp(wanted) * (wanted - said)).sum(-1)
    few = drift.divergences([row[:5] for row in wanted], [row[:5] for row in said])
    most = drift.divergences([row[:49] for row in wanted], [row[:49] for row in said])
    assert (few <= whole + 1e-5).all()
    assert most == pytest.approx(whole, rel=1e-3, abs=1e-5)
