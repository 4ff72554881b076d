"""``ridgeline imatrix``."""

from pathlib import Path

import gguf
import numpy as np

from ridgeline.cli.main import main


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = main(["imatrix", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_text_becomes_a_file_that_convert_takes(capsys, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "imatrix.gguf"
    text.write_text("def f(x):\n    return x\n" * 40)
    options = ("--calibration", text, "--window-tokens", 64, "--num-windows", 3)
    code, printed, _ = run(capsys, "-o", out, *options)
    assert code == 0
    assert printed.startswith(f"{out}: 36 matrices, 192 tokens")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(out).tensors}
    assert np.all(tensors["blk.0.ffn_down.weight.counts"] == 192)
    model = tmp_path / "x.gguf"
    arguments = ["embedded", str(model), "--format", "gguf", "--gguf-type", "q4_0", "--imatrix"]
    assert main(["convert", *arguments, str(out)]) == 0
    field = gguf.GGUFReader(model).get_field("quantize.imatrix.dataset")
    assert field is not None
    assert field.contents() == str(text)


def test_mistakes_are_one_line(capsys, tmp_path: Path) -> None:
    out = tmp_path / "imatrix.gguf"
    for options, message in (
        (("--calibration", tmp_path / "no.txt"), "cannot be read"),
        (("--num-windows", 0), "--num-windows is 0"),
    ):
        code, printed, err = run(capsys, "-o", out, *options)
        assert (code, printed) == (2, "")
        assert message in err
        assert err.count("\n") == 1
    out.write_text("mine")
    assert "exists already" in run(capsys, "-o", out)[2]
    assert out.read_text() == "mine"
