"""`pull`, `list`, `show` and `rm` against a hub on this machine, and aliases."""

import json
import shutil

import pytest
from tests.weights.conftest import NAME, hub  # noqa: F401

from ridgeline.cli.main import main
from ridgeline.weights import locate_model
from ridgeline.weights.aliases import read_aliases, write_alias
from ridgeline.weights.downloaded import downloaded_models

CARD = b"---\nlicense: apache-2.0\nlanguage: [en]\n---\n# A model\n"


@pytest.fixture(autouse=True)
def own_config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def real(hub, model_folder):  # noqa: F811
    """A hub whose repository has a whole model and a card."""
    hub.files.clear()
    for path in model_folder.iterdir():
        hub.files[path.name] = path.read_bytes()
    hub.files["README.md"] = CARD
    return hub


@pytest.fixture
def ggufs(hub, tmp_path, model_folder):  # noqa: F811
    """A hub whose repository has a GGUF model twice."""
    from tests.weights.gguf_export import export

    file = tmp_path / "m.gguf"
    export(model_folder, file, "llama")
    hub.files.clear()
    for name in ("m-F32.gguf", "m-Q8_0.gguf"):
        hub.files[name] = file.read_bytes() + name.encode()
    hub.files["README.md"] = CARD
    return hub


def listed(capsys, *words):
    assert main(["list", "--json", *words]) == 0
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)["models"]}


def test_a_model_is_pulled_listed_shown_and_removed(real, capsys):
    assert main(["list"]) == 0
    assert "Nothing was downloaded yet" in capsys.readouterr().err
    assert main(["pull", NAME, "--alias", "mine"]) == 0
    shown = capsys.readouterr()
    assert "apache-2.0" in shown.out
    assert "ridgeline chat mine" in shown.err
    (entry,) = listed(capsys).values()
    assert entry["aliases"] == ["mine"]
    assert entry["bits"] == pytest.approx(32, abs=1)
    assert (entry["family"], entry["fits"], entry["context"]) == ("llama", True, 256)
    assert main(["show", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == NAME
    before = locate_model("mine", offline=True)
    assert before == locate_model(NAME, offline=True)
    assert main(["rm", "mine"]) == 0
    assert "mine is gone: 0.00 GB, and with it mine" in capsys.readouterr().err
    assert downloaded_models() == []
    assert read_aliases() == {}
    assert main(["rm", "mine"]) == 1
    assert "was not downloaded" in capsys.readouterr().err


def test_what_was_not_downloaded_is_told_how_it_would_be(real, capsys):
    assert main(["show", "owner/nothing"]) == 1
    assert "download it with `ridgeline pull owner/nothing`" in capsys.readouterr().err


def test_a_second_pull_fetches_nothing(real, capsys):
    main(["pull", NAME])
    real.requests.clear()
    main(["pull", NAME])
    assert real.fetched() == []


def test_one_gguf_file_of_a_repository_and_its_removal(ggufs, capsys):
    assert main(["pull", f"{NAME}:F32"]) == 0
    assert main(["pull", f"{NAME}:Q8_0"]) == 0
    capsys.readouterr()
    found = listed(capsys)
    assert set(found) == {f"{NAME}:F32", f"{NAME}:Q8_0"}
    assert found[f"{NAME}:F32"]["licence"] == "apache-2.0"
    assert main(["rm", f"{NAME}:F32"]) == 0
    capsys.readouterr()
    assert set(listed(capsys)) == {f"{NAME}:Q8_0"}
    assert locate_model(f"{NAME}:Q8_0", offline=True).read_bytes().endswith(b"m-Q8_0.gguf")


def test_files_of_a_folder_are_listed(ggufs, tmp_path, capsys):
    found = listed(capsys, str(tmp_path))
    assert set(found) == {str(tmp_path / "m.gguf")}
    assert main(["list", str(tmp_path / "none")]) == 2
    (tmp_path / "other").mkdir()
    capsys.readouterr()
    assert main(["list", str(tmp_path / "other"), "--json", str(tmp_path)]) == 0
    assert str(tmp_path / "m.gguf") in capsys.readouterr().out


def test_a_model_that_cannot_be_run_is_listed_with_the_reason(real, capsys):
    config = json.loads(real.files["config.json"])
    main(["pull", NAME])
    capsys.readouterr()
    (model,) = downloaded_models()
    path = (model.path / "config.json").resolve()
    path.write_text(json.dumps(config | {"model_type": "unheard_of"}))
    (entry,) = listed(capsys).values()
    assert "unheard_of" in entry["problem"]


def test_what_is_shown_has_words_and_not_names_of_fields(capsys):
    assert main(["show", "embedded"]) == 0
    shown = {line[:10].strip(): line[11:] for line in capsys.readouterr().out.splitlines()}
    assert (shown["size"], shown["needs"]) == ("0.02 GB", "0.02 GB")
    assert (shown["fits here"], shown["family"]) == ("yes", "llama")


def test_aliases_are_names(real, capsys):
    assert main(["pull", NAME, "--alias", "no/slash"]) == 2
    assert "is no alias" in capsys.readouterr().err
    assert real.fetched() == []


def test_an_alias_is_pulled_and_shown_as_its_model(ggufs, capsys):
    write_alias("mine", f"{NAME}:f32")
    assert main(["pull", "mine"]) == 0
    told = capsys.readouterr()
    assert f"{NAME}:F32, mine" in told.out
    assert "apache-2.0" in told.out
    assert "ridgeline chat mine" in told.err
    assert main(["show", "mine", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["licence"]) == (f"{NAME}:F32", "apache-2.0")


def test_an_alias_goes_with_the_file_that_it_names(ggufs, capsys):
    for quantization in ("F32", "Q8_0"):
        main(["pull", f"{NAME}:{quantization}", "--alias", quantization.lower()])
    assert main(["rm", f"{NAME}:F32"]) == 0
    assert read_aliases() == {"q8_0": f"{NAME}:Q8_0"}
    assert main(["rm", NAME]) == 0
    assert read_aliases() == {}


def test_a_path_is_not_pulled(real, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert main(["pull", "~/model"]) == 2
    assert "is on this machine already" in capsys.readouterr().err


def test_a_file_of_aliases_that_is_none(tmp_path, capsys):
    folder = tmp_path / "config" / "ridgeline"
    folder.mkdir(parents=True)
    (folder / "aliases.yaml").write_text("- a\n- b\n")
    assert main(["generate", "mine", "-p", "x"]) == 1
    assert "must have lines such as" in capsys.readouterr().err


def test_a_folder_goes_before_an_alias(model_folder, tmp_path, monkeypatch):
    folder = tmp_path / "config" / "ridgeline"
    folder.mkdir(parents=True)
    (folder / "aliases.yaml").write_text("mine: owner/other\n")
    shutil.copytree(model_folder, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert str(locate_model("mine")) == "mine"
