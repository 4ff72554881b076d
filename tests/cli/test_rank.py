import json

import pytest

from ridgeline.cli.main import main

SHAPES = ("llama-3.1-8b", "llama-3.2-1b", "llama-3.1-70b")


def run(capsys, *arguments):
    code = main(["rank", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def ranked(capsys, *arguments):
    return json.loads(run(capsys, *arguments, "--json")[1])["models"]


def test_what_fits_and_is_fast_comes_first(capsys):
    found = ranked(capsys, *SHAPES, "--hardware", "l4")
    assert [each["model"] for each in found] == ["llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"]
    assert [each["max_batch"] > 0 for each in found] == [True, True, False]
    assert found[2]["prefill"] is None
    small = found[0]
    assert small["prefill"]["low_s"] < small["prefill"]["seconds"] < small["prefill"]["high_s"]


def test_columns_without_a_figure_are_left_out(capsys):
    _, out, _ = run(capsys, *SHAPES, "--hardware", "l4")
    assert "SLO" not in out.split("note:")[0]
    assert "score" not in out
    _, out, _ = run(capsys, *SHAPES, "--hardware", "l4", "--slo", "tpot=0.05")
    assert "SLO" in out


def test_a_plan_says_the_same_of_a_lone_request(capsys):
    (one,) = ranked(capsys, "llama-3.1-8b", "--hardware", "h100", "--context", "1000")
    main(["plan", "--shape", "llama-3.1-8b", "--hardware", "h100", "--prompt", "1000", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert one["prefill"]["seconds"] == pytest.approx(plan["alone_ttft_s"], rel=0.05)
    assert one["decode"]["seconds"] == pytest.approx(plan["alone_tpot_s"], rel=0.06)
    assert one["max_batch"] == plan["max_batch"]
    assert one["weights_bytes"] == plan["weights_bytes"]


def test_concurrency_keeps_the_limit_and_not_one_more_would(capsys):
    limits = [0.03, 0.02, 0.015]
    found = [
        ranked(capsys, "llama-3.1-8b", "--hardware", "h100", "--slo", f"tpot={limit}")[0]
        for limit in limits
    ]
    assert all(each["tpot_s"] <= limit for each, limit in zip(found, limits, strict=True))
    assert [each["concurrency"] for each in found] == sorted(
        (each["concurrency"] for each in found), reverse=True
    )
    (none,) = ranked(capsys, "llama-3.1-8b", "--hardware", "h100", "--slo", "tpot=0.001")
    assert (none["concurrency"], none["meets_slo"]) == (0, False)


def test_scores_order_what_meets_the_limits(capsys, tmp_path):
    scores = tmp_path / "scores.json"
    scores.write_text(json.dumps({"llama-3.1-8b": 70, "llama-3.2-1b": 40}))
    options = (*SHAPES, "--hardware", "l4,h100", "--scores", str(scores))
    found = ranked(capsys, *options, "--slo", "tpot=0.03")
    meeting = [(each["model"], each["hardware"]) for each in found if each["meets_slo"]]
    assert meeting[0][0] == "llama-3.1-8b"
    assert {hardware for model, hardware in meeting if model == "llama-3.1-8b"} != {"L4"}
    out = " ".join(run(capsys, *options)[1].split())
    assert "No score is given for llama-3.1-70b." in out


def test_a_configuration_alone_is_enough_and_all_machines_are_looked_at(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {"model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "rms_norm_eps": 1e-6,
             "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
             "max_position_embeddings": 512, "torch_dtype": "float16"}
        )
    )  # fmt: skip
    result = json.loads(run(capsys, str(config), "--hardware", "all", "--by", "cost", "--json")[1])
    prices = [each["usd_per_1m_output"] for each in result["models"]]
    assert len(prices) > 5
    assert prices == sorted(prices)
    assert any("shorter" in note for note in result["notes"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("no-such-model", "--hardware", "l4"), "no-such-model"),
        (("llama-3.1-8b", "--hardware", "l4,l4"), "named once"),
        (("llama-3.1-8b", "--hardware", "this,l4", "--count", "2"), "one machine like this"),
        (("llama-3.1-8b", "--context", "0"), "--context"),
        (("llama-3.1-8b", "--hardware", "l4", "--scores", "none"), "is not"),
    ],
)
def test_bad_input_is_one_error(capsys, options, says):
    code, _, err = run(capsys, *options)
    assert code in (1, 2)
    assert says in err
    assert len(err.strip().splitlines()) == 1
