import argparse
import json
from dataclasses import replace

import msgspec
import pytest

from ridgeline.cli import plan
from ridgeline.cli.main import main
from ridgeline.cli.priced_model import read_model
from ridgeline.planning import catalogue_machine, load
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.memory import weights_bytes

PROMISED = {
    "fits", "weights_bytes", "kv_bytes_per_token", "max_batch", "ttft_s", "tpot_s",
    "output_tok_s", "goodput_rps", "usd_per_1m_output", "usd_per_1k_requests", "bound",
    "interval_80",
}  # fmt: skip
SHORT = ("--prompt", "200", "--output", "20")
FEW = (*SHORT, "--requests", "40")


def run(capsys, *arguments):
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_one_object_with_what_was_promised(capsys):
    options = (
        "--shape",
        "llama-3.1-8b",
        "--hardware",
        "l4",
        "--rate",
        "1",
        "--slo",
        "ttft=1,tpot=0.1",
    )
    code, out, _ = run(capsys, *options, *FEW, "--json")
    assert code == 0
    result = json.loads(out)
    assert result.keys() >= PROMISED
    assert set(result["bound"]) == {"prefill", "decode"}
    assert result["fits"] is True


def test_a_plan_is_written_as_one_page(capsys, tmp_path):
    page = tmp_path / "plan.html"
    options = ("--shape", "llama-3.1-8b", "--hardware", "l4", *SHORT, "--html", str(page))
    code, out, _ = run(capsys, *options, "--json")
    assert code == 0
    text = page.read_text()
    assert "<svg" in text
    assert "<link" not in text
    embedded = text.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(embedded) == json.loads(out)
    assert run(capsys, *options)[0] == 2  # and it is not written over


def test_goodput_is_named_with_its_limits_or_not_at_all(capsys):
    base = ("--shape", "llama-3.1-8b", "--hardware", "l4", *SHORT)
    _, out, _ = run(capsys, *base)
    out = " ".join(out.split())
    assert "requests/s are answered, with all of them sent at once; how many are good needs" in out
    _, out, _ = run(capsys, *base, "--rate", "1", "--slo", "ttft=1,tpot=0.1")
    out = " ".join(out.split())
    assert "of 1.00 that arrive in a second; goodput" in out
    assert "100% have TTFT up to 1 s and TPOT up to 0.1 s" in out
    result = json.loads(run(capsys, *base, "--rate", "1", "--slo", "ttft=0.001", "--json")[1])
    assert (result["goodput_rps"], result["slo_attainment"]) == (0.0, 0.0)
    assert result["completed_rps"] > 0.5
    assert result["slo"] == {"ttft_s": 0.001, "tpot_s": None, "end_to_end_s": None}


LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


def model_options(config, **changes):
    names = ("model", "shape", "dtype", "quantization", "kv_cache_dtype")
    return argparse.Namespace(**dict.fromkeys(names) | {"config": config} | changes)


def test_any_config(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    options = ("--config", str(path), "--hardware", "h100", "--quantization", "int4")
    code, out, _ = run(capsys, *options, "--kv-cache-dtype", "int8", *SHORT, "--json")
    assert code == 0
    assert json.loads(out)["kv_bytes_per_token"] == 2 * 4 * 2 * (64 + 4)


def test_the_format_of_the_weights_is_said(capsys):
    """A checkpoint in float32 is twice what its parameters suggest."""
    _, out, _ = run(capsys, "--shape", "gemma-2-2b", "--hardware", "l4", *SHORT)
    assert "weights 10.46 GB in float32" in out


def test_a_config_file_is_a_model_as_its_folder_is(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    of_file, of_folder = (
        run(capsys, str(name), "--hardware", "h100", *SHORT, "--json")[1]
        for name in (path, tmp_path)
    )
    of_file, of_folder = (json.loads(each) | {"model": ""} for each in (of_file, of_folder))
    assert of_file == of_folder


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "There is no file "),
        ('{"a": 1,}', "config.json is not valid JSON: "),
        ("[1]", "config.json holds no JSON object."),
    ],
)
def test_a_config_that_is_none_is_named_with_the_reason(capsys, tmp_path, content, told):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    code, _, err = run(capsys, "--config", str(path), "--hardware", "l4", *SHORT)
    assert code in (1, 2)
    assert told in err
    assert str(path) in err


def test_people_are_told_that_it_was_not_measured(capsys):
    code, out, _ = run(capsys, "--shape", "qwen2.5-0.5b", "--hardware", "t4", *SHORT)
    assert code == 0
    assert "not measured" in out
    assert "TPOT" in out


@pytest.mark.parametrize(
    "options",
    [
        ("--hardware", "abacus"),
        ("--hardware", "l4", "--shape", "none"),
        ("--hardware", "l4", "--slo", "ttft"),
        ("--hardware", "l4", "--slo", "ttft=-1"),
        ("--hardware", "l4", "--slo", "ttft=1,ttft=2"),
        ("--executor", "abacus"),
        ("--hardware", "l4", "--rate", "-1"),
        ("--hardware", "l4", "--count", "0"),
        ("--hardware", "l4", "--quantization", "int5"),
        ("--hardware", "l4", "--max-rate"),
        ("--hardware", "l4", "--cheapest"),
        ("--hardware", "l4", "--config", "/nowhere/config.json"),
        ("--hardware", "this", "--count", "2"),
        ("--hardware", "l4", "--place", "gpt2:many"),
        ("--hardware", "l4", "--kv-cache-dtype", "q4_k"),
        ("--hardware", "l4", "--kv-cache-dtype", "ternary"),
        ("--hardware", "tpu-v5e", "--shape", "gpt2", "--dtype", "float32"),
        ("--hardware", "l4", "--rate", "1", "--requests", "39"),
    ],
)
def test_mistakes_are_one_line(capsys, options):
    code, out, err = run(capsys, *options, *SHORT)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--hardware", "l4", "--max-rate", "--slo", "ttft=1", "--rate", "1"),
        ("--hardware", "l4", "--max-rate", "--slo", "ttft=1", "--trace", "trace.jsonl"),
        ("--hardware", "l4", "--trace", "trace.jsonl", "--rate", "1"),
        ("--hardware", "l4", "--trace", "trace.jsonl", "--prompt", "5"),
        ("--cheapest", "--rate", "1", "--hardware", "l4"),
        ("--cheapest", "--rate", "1", "--count", "2"),
        ("--cheapest", "--rate", "1", "-tp", "2"),
        ("--cheapest", "--rate", "1", "--usd-per-hour", "2"),
        ("--hardware", "l4", "--place", "gpt2", "--rate", "1"),
        ("--hardware", "l4", "--place", "gpt2", "-tp", "2"),
        ("--hardware", "l4", "--place", "gpt2", "--shape", "gpt2"),
        ("--hardware", "l4", "--calibrate"),
        ("--hardware", "l4", "--executor", "cpu"),
        ("--hardware", "l4", "--requests", "50"),
        ("--hardware", "l4", "--seed", "1"),
        ("--hardware", "l4", "--trace", "trace.jsonl", "--seed", "1"),
        ("--hardware", "l4", "--place", "gpt2", "--requests", "50"),
        ("--hardware", "l4", "--place", "gpt2:0", "--seed", "1"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(capsys, options):
    code, out, err = run(capsys, *options)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "means nothing" in err or "is for --hardware this" in err or "is of a rate" in err


def test_auto_is_what_is_done_anyway(capsys):
    base = ("--shape", "llama-3.1-8b", "--hardware", "l4", *SHORT, "--json")
    _, plain, _ = run(capsys, *base)
    _, auto, _ = run(capsys, *base, "--dtype", "auto", "--kv-cache-dtype", "auto")
    assert json.loads(plain) == json.loads(auto)


def test_a_quantized_checkpoint_is_priced_as_it_is(capsys):
    base = ("--hardware", "h100", *SHORT, "--json")
    _, out, _ = run(capsys, "--shape", "gpt-oss-20b", *base)
    assert json.loads(out)["weights_bytes"] == pytest.approx(13.8e9, rel=0.01)


def test_formats_that_our_executor_expands_are_named(capsys):
    base = ("--hardware", "h100", *SHORT)
    _, out, _ = run(capsys, "--shape", "gpt-oss-20b", *base)
    assert "note: Priced as an engine with kernels for MXFP4 runs it. Our cuda executor" in out
    told = " ".join(out.split())
    assert "typical efficiencies of tuned engines, not of our cuda executor" in told
    _, out, _ = run(capsys, "--shape", "llama-3.1-8b", "--quantization", "int3", *base, "--json")
    assert "does not quantize to that on load" in json.loads(out)["notes"][0]
    _, out, _ = run(capsys, "--shape", "llama-3.1-8b", "--quantization", "int4", *base, "--json")
    assert json.loads(out)["notes"] == []


@pytest.mark.parametrize(
    ("group_size", "act_order", "named"),
    [(128, True, True), (128, False, False), (-1, True, False)],
)
def test_gptq_out_of_order_is_expanded(tmp_path, group_size, act_order, named):
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": group_size}
    config = LLAMA | {"quantization_config": quantization | {"desc_act": act_order}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    machine = catalogue_machine(load_catalogue(), "h100")
    found = read_model(model_options(path), machine.calibration)
    assert any("act-order GPTQ" in note for note in found.notes) is named


def test_our_cuda_executor_is_priced_as_it_expands():
    """Its own calibration, on the machine at hand."""
    typical = catalogue_machine(load_catalogue(), "h100").calibration
    ours = msgspec.structs.replace(
        typical, executor="cuda", ceilings=replace(typical.ceilings, measured=True)
    )
    options = model_options(None, shape="gpt-oss-20b")
    engine, own = (read_model(options, each) for each in (typical, ours))
    assert weights_bytes(own.priced) > 2.5 * weights_bytes(engine.priced)
    assert own.notes == ()


def test_a_placement_says_what_its_prices_are(capsys):
    options = ("--hardware", "gaudi3", "--place", "gpt2", "--dtype", "bfloat16")
    _, out, _ = run(capsys, *options)
    assert "note: Intel Gaudi 3 is no GPU" in out
    _, out, _ = run(capsys, *options, "--json")
    assert len(json.loads(out)["notes"]) == 1


def test_more_devices_than_a_replica_takes(capsys):
    options = ("--shape", "deepseek-v3", "--hardware", "h100", "--count", "16")
    _, out, _ = run(capsys, *options, "--quantization", "fp8", *SHORT)
    out = " ".join(out.split())
    assert "beside the weights on 8 × NVIDIA H100 SXM" in out
    assert "in one host, of up to 8" in out


def test_ranks_are_as_many_devices_if_not_told_otherwise(capsys):
    code, out, _ = run(capsys, "--shape", "llama-3.1-8b", "--hardware", "h100", "-tp", "2", *SHORT)
    assert code == 0
    assert out.startswith("llama-3.1-8b on 2 × NVIDIA H100 SXM (1 × tensor-parallel 2)")


def test_a_request_is_no_longer_than_the_context_if_not_told_otherwise(capsys):
    code, out, err = run(capsys, "--hardware", "l4")
    assert (code, err) == (0, "")
    assert "sequences of 1,024 tokens" in out  # the embedded model's context


def test_what_does_not_fit_is_told_what_would_help(capsys):
    code, out, _ = run(capsys, "--shape", "llama-3.1-70b", "--hardware", "l4")
    assert code == 0
    assert "--quantization int4" in out


def test_a_machine_that_is_called_otherwise(capsys):
    code, _, err = run(capsys, "--shape", "llama-3.1-8b", "--hardware", "h100-sxm")
    assert code == 2
    assert "Unknown hardware 'h100-sxm'; did you mean h100? Choose this, or one of a10" in err


def test_power_is_said_to_be_an_upper_bound(capsys):
    _, out, _ = run(capsys, "--shape", "qwen2.5-0.5b", "--hardware", "l4", "--count", "2", *SHORT)
    assert "at most 144 W by the datasheet, so" in out
    assert "not measured" in out


def test_the_cheapest_machines_run_no_formats_of_this_one(capsys, monkeypatch):
    """Nor is this machine calibrated for it."""

    def calibrates(_):
        raise AssertionError

    whole = load_catalogue()
    few = replace(whole, devices={name: whole.devices[name] for name in ("t4", "l4")})
    monkeypatch.setattr(plan, "this_calibration", calibrates)
    monkeypatch.setattr(plan, "load_catalogue", lambda _: few)
    options = ("--shape", "qwen2.5-0.5b", "--rate", "2", "--cheapest", *SHORT, "--json")
    code, out, _ = run(capsys, *options)
    assert code == 0
    first = json.loads(out)["machines"][0]
    assert first["weights_bytes"] == pytest.approx(2 * 494e6, rel=0.01)


def test_a_load_that_no_machine_holds(capsys, monkeypatch):
    whole = load_catalogue()
    few = replace(whole, devices={"t4": whole.devices["t4"]})
    monkeypatch.setattr(plan, "load_catalogue", lambda _: few)
    code, out, _ = run(capsys, "--shape", "qwen2.5-0.5b", "--rate", "5000", "--cheapest", *SHORT)
    assert code == 0
    assert out.startswith("No machine of the catalogue")


def test_machines_left_out_of_a_search_are_named(capsys, monkeypatch):
    whole = load_catalogue()
    few = replace(whole, devices={"l4": whole.devices["l4"]})
    monkeypatch.setattr(plan, "load_catalogue", lambda _: few)
    monkeypatch.setattr(load, "MOST_STEPS", 10)
    options = ("--shape", "llama-3.1-8b", "--rate", "2", "--cheapest", *SHORT)
    code, out, _ = run(capsys, *options)
    assert code == 0
    assert "note: Left out, as simulating it would take minutes: 1 × NVIDIA L4, 2 ×" in out
    _, out, _ = run(capsys, *options, "--json")
    result = json.loads(out)
    assert result["machines"] == []
    assert len(result["notes"]) == 1


def test_placement(capsys):
    options = ("--hardware", "l4", "--count", "2", "--place", "llama-3.1-8b", "--place", "gpt2")
    code, out, _ = run(capsys, *options, "--json")
    assert code == 0
    result = json.loads(out)
    assert result["left_over"] == []
    assert sum(len(names) for names in result["devices"].values()) == 2


ON_H100 = ("--shape", "llama-3.1-8b", "--hardware", "h100", *SHORT)


@pytest.mark.parametrize("options", [(), ("--rate", "2"), ("--quantization", "int4")])
def test_no_line_is_over_100_columns(capsys, options):
    code, out, _ = run(capsys, *ON_H100, *options, "--api-usd-per-1m", "0.0001", "--slo", "ttft=1")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100


def test_latencies_say_what_they_are(capsys):
    """A mean hides a tail: under a load there are percentiles beside it."""
    _, out, _ = run(capsys, *ON_H100)
    assert "TTFT alone" in out
    assert "TTFT mean" not in out
    assert "alone: TTFT" not in out  # the same figures again
    loaded = (*ON_H100, "--rate", "20", "--requests", "60")
    _, out, _ = run(capsys, *loaded)
    (line,) = (line for line in out.splitlines() if "TTFT mean" in line)
    assert "p50" in line
    assert "p95" in line
    assert "p99" not in line  # of 60 requests
    result = json.loads(run(capsys, *loaded, "--json")[1])
    found = result["percentiles"]["ttft_s"]
    assert 0 < found["p50"] <= found["p90"] <= found["p95"]
    assert set(result["percentiles"]) == {"ttft_s", "tpot_s"}


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        ("0.0001", "which it cannot reach: at most"),
        ("0.5", "tok/s all the time; it answers"),
        ("1000", "cheaper than the API: break-even at"),
    ],
)
def test_whether_the_break_even_can_be_reached(capsys, usd, text):
    options = (*ON_H100, "--rate", "2", "--requests", "40", "--api-usd-per-1m", usd)
    _, out, _ = run(capsys, *options)
    assert text in " ".join(out.split())
    result = json.loads(run(capsys, *options, "--json")[1])
    assert result["most_output_tok_s"] > result["output_tok_s"]


def test_layouts_are_compared_and_the_best_is_named(capsys):
    options = ("--shape", "qwen3-30b-a3b", "--hardware", "h100", "--count", "4", "--layouts")
    code, out, _ = run(capsys, *options, *SHORT, "--json")
    assert code == 0
    result = json.loads(out)
    names = [each["options"] for each in result["layouts"]]
    assert set(names) == {
        "-dp 4", "-pp 2 -dp 2", "-pp 4", "-tp 2 -dp 2", "-tp 2 -pp 2", "-tp 4", "-ep 2 -dp 2",
        "-pp 2 -ep 2", "-ep 4", "-tp 2 -ep 4", "-cp 2 -dp 2", "-cp 4",
    }  # fmt: skip
    assert result["best"] == names[0]
    by_name = {each["options"]: each for each in result["layouts"]}
    assert by_name["-tp 4"]["sent_bytes"] > by_name["-tp 2 -dp 2"]["sent_bytes"] > 0
    _, out, _ = run(capsys, *options, *SHORT)
    assert f"best {names[0]}" in " ".join(out.split())


def test_machines_like_this_one_are_stages_of_a_pipeline_over_a_network(capsys, monkeypatch):
    known = catalogue_machine(load_catalogue(), "l4").calibration
    known = msgspec.structs.replace(known, executor="cpu")
    monkeypatch.setattr(plan, "this_calibration", lambda _: known)
    base = ("--shape", "qwen3-0.6b", "--layouts", "--count", "2", *SHORT, "--json")
    result = json.loads(run(capsys, *base, "--network-gb-per-s", "0.125")[1])
    assert {each["options"] for each in result["layouts"]} == {"-dp 2", "-pp 2"}
    result = json.loads(run(capsys, *base)[1])
    assert result["refused"] == {
        "Its stages are in several hosts; give --network-gb-per-s.": ["-pp 2"]
    }
    assert "one machine like this" in run(capsys, "--shape", "qwen3-0.6b", "--count", "2")[2]


def test_layouts_that_miss_the_limits_or_do_not_fit_are_not_called_best(capsys):
    base = ("--shape", "qwen3-0.6b", "--hardware", "l4", "--layouts", *SHORT)
    text = " ".join(run(capsys, *base, "--slo", "tpot=0.000001")[1].split())
    assert "none meets the limits; most tokens with -tp 1" in text and "best" not in text
    out = run(capsys, "--shape", "llama-3.1-70b", "--hardware", "l4", "--layouts", *SHORT)[1]
    assert "none holds a sequence of this length" in out and "tok/s" not in out
    assert "--quantization int4" in out


def test_heads_that_do_not_divide_are_said(capsys):
    out = run(capsys, "--shape", "llama-3.2-1b", "--hardware", "h100", "-tp", "7", *SHORT)[1]
    assert "heads do not divide by 7" in " ".join(out.split())


def test_what_layouts_do_not_take_is_refused(capsys):
    base = ("--shape", "qwen3-0.6b", "--hardware", "l4")
    for more, message in (
        (("--layouts", "-tp", "2"), "--tensor-parallel means nothing with --layouts"),
        (("--layouts", "--rate", "1"), "--rate means nothing with --layouts"),
        (("--network-gb-per-s", "1"), "--network-gb-per-s is of --layouts"),
        (("--layouts", "--network-us", "1"), "--network-us needs --network-gb-per-s"),
    ):
        code, _, error = run(capsys, *base, *more)
        assert code == 2
        assert message in " ".join(error.split())
