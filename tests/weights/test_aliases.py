"""Names that a user gave to models."""

import pytest

from ridgeline.core.errors import CorruptFileError, InvalidRequestError
from ridgeline.weights.aliases import forget_aliases, read_aliases, write_alias


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "ridgeline").mkdir()
    return tmp_path / "ridgeline" / "aliases.yaml"


def test_an_alias_is_kept_until_it_is_forgotten(file):
    assert read_aliases() == {}
    write_alias("a", "org/one")
    write_alias("b.2-x_y", "org/two")
    write_alias("a", "org/three")
    assert read_aliases() == {"a": "org/three", "b.2-x_y": "org/two"}
    assert forget_aliases(lambda model: model == "org/two") == ["b.2-x_y"]
    assert read_aliases() == {"a": "org/three"}
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_what_is_no_list_of_names_and_models_is_one_sentence(file):
    for text in ("[a, b]", "a", "a: 1", "1: a", "a: [b]", "{", "\0"):
        file.write_text(text)
        with pytest.raises(CorruptFileError, match=r"aliases\.yaml"):
            read_aliases()
    file.write_text("# nothing yet\n")
    assert read_aliases() == {}


def test_what_is_no_name_is_refused(file):
    for alias in ("", ".a", "a/b", "a b", "é", "x" * 65):
        with pytest.raises(InvalidRequestError, match="no alias"):
            write_alias(alias, "org/one")
    write_alias("x" * 64, "org/one")
    assert read_aliases() == {"x" * 64: "org/one"}
