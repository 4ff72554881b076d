"""`ridgeline quantize` and `ridgeline eval` from the command line."""

import json

import pytest
from tests.compress.folders import SMALL, write_folder

from ridgeline.cli import main
from ridgeline.kernels.cpu.library import native_kernels_run

QUICK = ["--num-windows", "4", "--window-tokens", "64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("models") / "model", SMALL)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "held.jsonl"
    path.write_text('{"text": "def f(x):\\n    return x + 1\\n"}\n{"text": "import numpy"}\n')
    return path


def test_a_folder_becomes_a_smaller_one_and_the_table_tells(folder, text, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["quantize", str(folder), "-o", str(out), "--text", str(text), *QUICK]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "peak " in captured.err
    assert "Measuring the quality on 2 texts (--no-quality leaves it out)." in captured.err
    lines = captured.out.splitlines()
    assert lines[0].startswith(f"{out}: ")
    assert "of rounding to the nearest" in lines[0]
    table = "\n".join(lines[1:])
    assert "as it was" in table and "weights alone, float32" in table
    if native_kernels_run():
        assert "served, cpu" in table
    assert main([*words[:4], "--resume", "--no-quality", *QUICK]) == 0
    assert main([*words, "--no-quality"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_name_of_a_gguf_file_is_its_format(tmp_path, capsys):
    out = tmp_path / "out.gguf"
    words = ["quantize", "embedded", "-o", str(out), "--method", "rtn", "--no-quality"]
    assert main([*words, "--gguf-type", "q8_0"]) == 0
    assert out.read_bytes()[:4] == b"GGUF"
    assert main([*words, "--format", "gptq"]) == 2
    assert "is a GGUF file by its name, not a folder of --format gptq" in capsys.readouterr().err


def test_settings_come_from_a_file_and_the_command_line_goes_before(folder, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method: rtn\nbits: 8\ngroup-size: 64\n")
    out = tmp_path / "out"
    words = ["quantize", str(folder), "-o", str(out), "--recipe", str(recipe), "--no-quality"]
    assert main([*words, "--bits", "4"]) == 0
    manifest = json.loads((out / "ridgeline-manifest.json").read_text())
    assert manifest["recipe"]["method"] == "rtn"
    assert (manifest["recipe"]["bits"], manifest["recipe"]["group_size"]) == (4, 64)
    recipe.write_text("bitz: 8\n")
    assert main(words) == 2
    assert "did you mean 'bits'" in capsys.readouterr().err


def test_eval_compares_with_a_reference_and_knows_its_noise(folder, text, tmp_path, capsys):
    out = tmp_path / "out"
    quick = ["--method", "rtn", "--no-quality"]
    assert main(["quantize", str(folder), "-o", str(out), *quick]) == 0
    exact = ["--executor", "reference", "--dtype", "float32", "--text", str(text)]
    capsys.readouterr()
    assert main(["eval", str(out), "--against", str(folder), *exact, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["is_above_noise"]
    assert figures["kl"] > 1e-4 > figures["noise_floor"]
    assert main(["eval", str(folder), "--against", str(folder), *exact]) == 0
    assert "no difference above the noise" in capsys.readouterr().out
    assert main(["eval", str(folder), *exact]) == 0
    alone = capsys.readouterr().out
    assert "perplexity" in alone and "KL" not in alone
    other = write_folder(tmp_path / "other", SMALL | {"vocab_size": 4100})
    assert main(["eval", str(folder), "--against", str(other), *exact]) == 2
    assert "cannot be compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--gguf-type", "q4_0"),
        ("--method", "rtn", "--calibration", "embedded"),
        ("-o", "x.gguf", "--format", "gptq"),
    ],
)
def test_what_would_have_no_effect_is_refused(arguments, tmp_path, capsys):
    assert main(["quantize", "-o", str(tmp_path / "out"), *arguments]) != 0
    assert "gguf" in (told := capsys.readouterr().err) or "no effect" in told
    assert not list(tmp_path.iterdir())
