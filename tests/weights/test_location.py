"""From names to folders, without a network."""

import sys
from pathlib import Path

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ModelNotFoundError, UnsupportedModelError
from ridgeline.engine.loading import describe_model
from ridgeline.weights import locate_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def test_a_folder_is_itself(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_model(str(model)) == model
    assert locate_model(f"{model}/") == model
    monkeypatch.chdir(model.parent)
    assert locate_model(model.name) == Path(model.name)
    monkeypatch.setenv("HOME", str(model.parent))
    assert locate_model(f"~/{model.name}") == model


def test_the_embedded_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.weights.location.resources.files", lambda _: model.parent)
    monkeypatch.setattr("ridgeline.weights.location._EMBEDDED", (model.name,))
    assert locate_model(None) == model
    monkeypatch.setattr("ridgeline.weights.location._EMBEDDED", ("nothing",))
    with pytest.raises(ModelNotFoundError, match="no embedded model"):
        locate_model(None)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("hub.example/owner/Model-GGUF:Q4_K_M", r"its model is called owner/Model-GGUF:Q4_K_M\."),
        ("https://hub.example/owner/model", r"its model is called owner/model\."),
        ("llama3.2:1b", "Names of Ollama's library are not the hub's"),
    ],
)
def test_names_as_other_programs_have_them_are_told_ours(name: str, told: str) -> None:
    with pytest.raises(ModelNotFoundError, match=told):
        locate_model(name)


@pytest.mark.parametrize("name", ["/nope", "./nope", "../nope", "nope/", "a/b/c", "~/nope", "a\\b"])
def test_what_looks_like_a_path_is_not_sought_at_the_hub(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        locate_model(name)


@pytest.mark.parametrize(
    "name",
    ["", " ", "a b", "a--b", "a..b", "-a", "a.", "owner/", "é/x", "a\0b", "a" * 97, "a" * 5000,
     "a.git", "x\ny", "owner/name?x=1", "http:x"],
)  # fmt: skip
def test_what_is_no_name(name: str) -> None:
    with pytest.raises((ModelNotFoundError, UnsupportedModelError)) as caught:
        locate_model(name)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_a_file_is_no_folder(model: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is a file"):
        locate_model(str(model / "config.json"))


@pytest.mark.parametrize(
    ("files", "kind", "text"),
    [
        ([], ModelNotFoundError, r"no config\.json, and no model\.safetensors"),
        (["config.json"], ModelNotFoundError, r"no model\.safetensors"),
        (["model.safetensors"], ModelNotFoundError, r"no config\.json"),
        (["adapter_config.json"], ModelNotFoundError, "is a LoRA adapter: load the model"),
        (["config.json", "pytorch_model.bin"], UnsupportedModelError, r"pytorch_model\.bin"),
        (["a-Q4_0.gguf", "a-Q8_0.gguf"], ModelNotFoundError, "several GGUF files.*of Q4_0, Q8_0"),
    ],
)
def test_folders_that_lack_something(tmp_path: Path, files: list[str], kind, text: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(kind, match=text):
        locate_model(str(tmp_path))


def test_a_folder_of_an_unsupported_model_without_weights_says_both(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(
        UnsupportedModelError, match=r"'mamba' is not supported.*Mamba.*no model\.safetensors"
    ):
        describe_model(EngineConfig(model=str(tmp_path)))


def test_a_folder_without_weights_will_do_where_none_are_needed(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "pytorch_model.bin").touch()
    assert locate_model(str(tmp_path), need_weights=False) == tmp_path


def test_a_link_that_leads_nowhere_does_not_count(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(model / "gone")
    with pytest.raises(ModelNotFoundError, match=r"no model\.safetensors"):
        locate_model(str(model))


def test_a_folder_needs_no_hub_library(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert locate_model(str(model)) == model
