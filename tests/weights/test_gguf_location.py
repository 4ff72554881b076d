"""Which GGUF file is meant: by path, by folder, and by quantization at the hub."""

from pathlib import Path

import pytest
from tests.weights.conftest import FakeHub

from ridgeline.core.errors import CorruptFileError, ModelNotFoundError
from ridgeline.weights import locate_model
from ridgeline.weights.gguf.choice import choose_gguf, quantization_of

FILES = {
    "README.md": b"text",
    "name-Q4_K_M.gguf": b"GGUF 4",
    "name-Q8_0.gguf": b"GGUF 8",
    "BF16/name-BF16-00001-of-00002.gguf": b"GGUF 1",
    "BF16/name-BF16-00002-of-00002.gguf": b"GGUF 2",
    "mmproj-name-F16.gguf": b"GGUF v",
}


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("llama-2-7b.q5_0.gguf", "Q5_0"),
        ("x/Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gemma-3-1b-it-f16.gguf", "F16"),
        ("m-IQ4_XS-00001-of-00003.gguf", "IQ4_XS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("plain.gguf", "plain"),
    ],
)
def test_quantization_of_a_name(name: str, quantization: str) -> None:
    assert quantization_of(name) == quantization


def test_a_file_and_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "a-Q4_0.gguf"
    with pytest.raises(ModelNotFoundError, match="no file"):
        locate_model(str(file))
    file.touch()
    assert locate_model(str(file)) == file
    assert locate_model(str(tmp_path)) == file
    (tmp_path / "a-Q8_0.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"several GGUF files.*of Q4_0, Q8_0\."):
        locate_model(str(tmp_path))
    assert locate_model(f"{tmp_path}:q4_0") == file
    with pytest.raises(ModelNotFoundError, match=r"no single Q5_K_M.*Q4_0, Q8_0"):
        locate_model(f"{tmp_path}:Q5_K_M")
    for no_quantization in ("", "Q4 0", "-Q4_0"):
        with pytest.raises(ModelNotFoundError, match="no folder"):
            locate_model(f"{tmp_path}:{no_quantization}")


@pytest.mark.parametrize(("count", "end"), [(2, "m1"), (40, "m9"), (41, "m8 and 1 more")])
def test_of_many_quantizations_the_first_40_are_told(count: int, end: str) -> None:
    names = [f"m{number}.gguf" for number in range(count)]
    with pytest.raises(ModelNotFoundError, match=rf"of m0, .*\b{end}\."):
        choose_gguf(names, None, "here")


def test_a_part_is_missing() -> None:
    with pytest.raises(CorruptFileError, match="lacks 1 of the 2 parts"):
        choose_gguf(["a-Q4_0-00001-of-00002.gguf"], "Q4_0", "here")


def test_the_hub(hub: FakeHub) -> None:
    hub.files = dict(FILES)
    file = locate_model("owner/name:Q4_K_M")
    assert file.read_bytes() == b"GGUF 4"
    assert hub.fetched() == ["name-Q4_K_M.gguf"]
    assert locate_model("owner/name:q4_k_m", offline=True) == file
    with pytest.raises(ModelNotFoundError, match="not downloaded before"):
        locate_model("owner/name:Q8_0", offline=True)
    parts = locate_model("owner/name:BF16")
    assert parts.name == "name-BF16-00001-of-00002.gguf"
    assert parts.with_name("name-BF16-00002-of-00002.gguf").read_bytes() == b"GGUF 2"
    with pytest.raises(ModelNotFoundError, match=r"no single Q5_0.*BF16, Q4_K_M, Q8_0\."):
        locate_model("owner/name:Q5_0")
    with pytest.raises(ModelNotFoundError, match=r"only as GGUF.*'Q4_K_M'"):
        locate_model("owner/name")
