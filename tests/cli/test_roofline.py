import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from tests.roofline.test_fitting import CEILINGS, samples

from ridgeline.cli.main import main
from ridgeline.executors import default_executor
from ridgeline.models import PRESETS, describe, lower
from ridgeline.roofline import PricedModel, decode_batch, pass_work
from ridgeline.roofline.calibration import calibrate, calibration_path, save
from ridgeline.roofline.explain import crossover_context


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
    assert "<!-- roof of the datasheet, ridge at 295.2 FLOPs/byte -->" in svg.read_text()


@pytest.mark.parametrize("command", ["roofline", "profile", "bench ladder"])
def test_a_drawing_is_written_over_nothing(command, capsys, tmp_path):
    svg = tmp_path / "roof.svg"
    svg.write_text("mine")
    assert main([*command.split(), "--svg", str(svg)]) == 2
    assert f"{svg} is there already: it is not written over." in capsys.readouterr().err
    assert svg.read_text() == "mine"


def test_decode_is_about_one_flop_a_byte(capsys):
    _, out, _ = run(capsys, "--shape", "llama-2-7b", "--hardware", "a100", "--batch", "1", "--json")
    first = json.loads(out)["points"][0]
    assert first["intensity"] == pytest.approx(1.0, rel=0.1)


def test_what_does_not_fit_is_said_and_not_advised(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    options = ("--shape", "llama-3.1-70b", "--hardware", "h100", "--batch", "8,32")
    code, out, _ = run(capsys, *options)
    assert code == 0
    assert "One sequence of 512 tokens does not fit: of " in out
    assert "memory; does not fit" in out
    assert "instead of" not in out
    _, out, _ = run(capsys, *options, "-tp", "4", "--json")
    result = json.loads(out)
    assert result["tensor_parallel"] == 4
    assert result["fit"]["512"]["max_batch"] > 64
    assert all(point["fits"] for point in result["points"])
    assert any("instead of 8" in each["change"] for each in result["advice"])


def test_a_larger_batch_is_advised_as_far_as_it_fits(capsys):
    options = ("--shape", "llama-3.1-8b", "--hardware", "l4", "--batch", "8", "--context", "2048")
    _, out, _ = run(capsys, *options, "--json")
    result = json.loads(out)
    room = result["fit"]["2048"]["max_batch"]
    assert 8 < room < 64
    changes = [each["change"] for each in result["advice"]]
    assert f"batch {room} instead of 8" in changes


def test_a_datasheet_is_drawn_for_the_same_products(capsys, tmp_path, monkeypatch):
    """Eight-bit weights are multiplied as integers on the cpu executor, on either machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ceilings = replace(CEILINGS, flops_per_s={"float32": 100e9, "int8": 400e9})
    calibration = calibrate(samples(), ceilings, executor="cpu", dense_attention=False)
    save(calibration, calibration_path("cpu"))
    options = ("--executor", "cpu", "--shape", "gpt2", "--quantization", "int8", "--json")
    _, out, _ = run(capsys, *options, "--datasheet", "h100")
    result = json.loads(out)
    assert result["ceilings"]["peak_flops_per_s"] == 400e9
    assert result["datasheet"]["peak"] == 1979e12


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_context_from_which_kv_outweighs_the_weights(batch_size):
    spec = describe(dict(PRESETS["llama-3.1-8b"])).spec
    model = PricedModel(spec=spec, ops=lower(spec))
    found = crossover_context(model, batch_size)
    for context, is_more in ((found - 1, False), (found, True)):
        work = pass_work(model, decode_batch(batch_size, context))
        assert (work.kv_read_bytes >= work.weight_bytes) is is_more


def test_a_full_window_never_outweighs_the_weights(capsys):
    _, out, _ = run(capsys, "--shape", "mistral-7b", "--hardware", "h100", "--json")
    limits = " ".join(json.loads(out)["limits"])
    assert "never reads more K and V than weights" in limits
    assert "32,768" in limits


def test_advice_has_the_formats_of_the_executor(capsys, tmp_path, monkeypatch):
    """With layers in four bits the head has six."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration = calibrate(samples(), CEILINGS, executor="cpu", dense_attention=False)
    save(calibration, calibration_path("cpu"))
    options = ("--shape", "qwen2.5-0.5b", "--executor", "cpu", "--batch", "1", "--json")
    _, out, _ = run(capsys, *options)
    wide = json.loads(out)
    _, out, _ = run(capsys, *options, "--quantization", "int4")
    narrow = json.loads(out)
    (gain,) = [e["gain"] for e in wide["advice"] if e["change"] == "quantize weights to int4"]
    seconds = [result["points"][0]["seconds"] for result in (wide, narrow)]
    assert gain == pytest.approx(seconds[0] / seconds[1], rel=1e-9)


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


@pytest.mark.parametrize("command", ["roofline", "plan"])
def test_a_calibration_of_a_busy_machine_is_said(capsys, tmp_path, monkeypatch, command):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    executor = default_executor()
    ceilings = replace(CEILINGS, conditions={"contended": True, "others_share": 0.42})
    save(
        calibrate(samples(), ceilings, executor=executor, dense_attention=False),
        calibration_path(executor),
    )
    assert main([command, "--hardware", "this", "--shape", "qwen2.5-0.5b"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "other processes took 42% of the processors while it was measured" in out


def test_contexts_that_the_model_lacks_are_said(capsys):
    options = ("--shape", "gpt2", "--hardware", "l4", "--batch", "1", "--context", "512,2048")
    _, out, _ = run(capsys, *options, "--json")
    result = json.loads(out)
    assert {point["context"] for point in result["points"]} == {512}
    assert result["limits"][-1] == "Beyond the model's 1,024 tokens, and left out: 2,048."


@pytest.mark.parametrize(
    ("executor", "options"),
    [
        ("cpu", ("--quantization", "fp8")),
        ("reference", ("--quantization", "int8")),
        ("reference", ("--kv-cache-dtype", "float16")),
    ],
)
def test_a_format_that_the_executor_here_refuses(capsys, tmp_path, monkeypatch, executor, options):
    """It is not advised either."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = calibrate(samples(), CEILINGS, executor=executor, dense_attention=False)
    save(found, calibration_path(executor))
    base = ("--shape", "qwen2.5-0.5b", "--executor", executor)
    code, out, err = run(capsys, *base, *options)
    assert (code, out) == (2, "")
    assert f"The {executor} executor" in err
    _, out, _ = run(capsys, *base, "--json")
    advised = any("--quantization" in each["how"] for each in json.loads(out)["advice"])
    assert advised == (executor == "cpu")


def test_a_narrow_terminal_has_a_narrow_drawing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    _, out, _ = run(capsys, "--shape", "gpt2", "--hardware", "l4", "--batch", "1")
    rows = [line for line in out.splitlines() if len(line) > 6 and line[6] in "|+"]
    assert len(rows) == 19  # 18 and the axis, none of them broken
    assert len(rows[-1]) == 50


def test_each_power_of_ten_is_written_once(capsys):
    """Also one in the middle between two rows."""
    _, out, _ = run(capsys, "--shape", "llama-3.1-8b", "--hardware", "h100")
    rows = [line.split() for line in out.splitlines() if line.lstrip().startswith("1e")]
    assert [row[0] for row in rows] == ["1e16", "1e15", "1e14", "1e13", "1e12", "1e0"]


@pytest.mark.parametrize(
    "options",
    [
        ("--hardware", "abacus"),
        ("--hardware", "l4", "--datasheet", "abacus"),
        ("--hardware", "h100", "--shape", "gpt2", "-tp", "8"),  # of 12 heads
        ("--hardware", "this", "--shape", "gpt2", "-tp", "2"),
        ("--hardware", "l4", "--shape", "gpt2", "--context", "100000"),
        ("--hardware", "l4", "--shape", "gpt2", "--executor", "cpu"),
        ("--executor", "abacus"),
        ("--executor", "cuda", "--calibrate"),
        ("--hardware", "l4", "--shape", "gpt2", "--calibrate"),
    ],
)
def test_mistakes_are_one_line(capsys, options, tmp_path, monkeypatch):
    executor = default_executor()
    cache = calibrate(samples(), CEILINGS, executor=executor, dense_attention=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save(cache, calibration_path(executor))
    code, out, err = run(capsys, *options)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
