"""``ridgeline convert``."""

import json
from pathlib import Path

import gguf
import pytest

from ridgeline.cli.main import main


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = main(["convert", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def q8_0(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("convert") / "x.gguf"
    assert main(["convert", "embedded", str(path), "--gguf-type", "q8_0"]) == 0
    return path


def test_the_embedded_model_becomes_gguf_with_tokenizer_and_template(q8_0: Path) -> None:
    reader = gguf.GGUFReader(q8_0)
    for key, value in {
        "general.architecture": "llama",
        "general.name": "ridgeline-embedded",
        "llama.block_count": 5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 4,
        "tokenizer.ggml.add_bos_token": True,
    }.items():
        field = reader.get_field(key)
        assert field is not None, key
        assert field.contents() == value, key
    assert reader.get_field("tokenizer.chat_template") is not None
    kinds = {tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds == {"F32", "Q8_0"}


def test_it_generates_what_the_folder_does(q8_0: Path, capsys) -> None:
    texts = []
    for model in ([], [str(q8_0)]):
        arguments = [*model, "--prompt", "def add(a, b):", "--max-tokens", "8", "--json"]
        assert main(["generate", *arguments, "--temperature", "0"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


def test_matrices_whose_rows_fit_no_block_of_256_are_told(capsys, caplog, tmp_path: Path) -> None:
    assert run(capsys, "embedded", tmp_path / "x.gguf", "--gguf-type", "q4_k_m")[0] == 0
    formats = [tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors]
    count, eights = formats.count("Q5_0"), formats.count("Q8_0")
    assert caplog.messages == [
        f"Rows of {count + eights} of {len(formats) - formats.count('F32')} matrices are no whole "
        f"blocks of q4_k_m: {count} are Q5_0 in place of Q4_K, {eights} are Q8_0 in place of Q6_K."
    ]


def test_back_to_safetensors(q8_0: Path, capsys, tmp_path: Path) -> None:
    out = tmp_path / "back"
    assert run(capsys, q8_0, out, "--format", "safetensors")[:2] == (0, f"{out}\n")
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("llama", "bfloat16")
    assert {path.name for path in out.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [0, 4]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--format", "gguf", "--dtype", "float16"), "--dtype is not of --format gguf"),
        (("--format", "safetensors", "--gguf-type", "q4_0"), "--gguf-type is not of"),
        (("--gguf-type", "q4_0"), "--gguf-type is not of --format safetensors"),
        (("--format", "gguf"), "must end in .gguf"),
    ],
)
def test_options_of_the_other_format_are_refused(capsys, tmp_path, arguments, text) -> None:
    code, out, err = run(capsys, "embedded", tmp_path / "x", *arguments)
    assert (code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1


def test_gguf_to_gguf_is_refused(q8_0: Path, capsys, tmp_path: Path) -> None:
    code, _, err = run(capsys, q8_0, tmp_path / "y.gguf", "--format", "gguf")
    assert code == 2
    assert "is GGUF already" in err
