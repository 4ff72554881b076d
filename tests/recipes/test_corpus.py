from dataclasses import replace
from pathlib import Path

from recipes.embedded import conversations, corpus

MODULE = '''"""Tools for boats."""


def sail(boat, wind=3):
    """Sail the boat as far as the wind allows.

    More words.
    """
    return boat.move(wind) and boat.dry and boat.afloat and boat.name != "Titanic"
'''


def make_library(folder: Path) -> Path:
    for i in range(200):
        file = folder / f"pkg{i % 7}" / f"module{i}.py"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(MODULE, encoding="utf-8")
    table = folder / "table.py"
    table.write_text("x = [" + "123, " * 300 + "]\n", encoding="utf-8")
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "other.py").write_text(MODULE, encoding="utf-8")
    return folder


def test_split_is_deterministic_and_disjoint(tmp_path: Path) -> None:
    folder = make_library(tmp_path)
    first = corpus.split(list(corpus.source_files(folder)))
    assert first == corpus.split(list(corpus.source_files(folder)))
    training, held_out = ({document.path for document in part} for part in first)
    assert not training & held_out
    assert len(training | held_out) == 200
    assert 1 <= len(held_out) <= 20


def test_split_does_not_change() -> None:
    held_out = {p for p in ("socket.py", "os.py", "statistics.py") if corpus.is_held_out(p)}
    assert held_out == {"socket.py", "statistics.py"}


def test_tables_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    paths = {document.path for document in corpus.source_files(make_library(tmp_path))}
    assert not {"table.py", "site-packages/other.py"} & paths


def test_derived_documents_follow_the_split() -> None:
    source = corpus.Document(kind="library", path="boats.py", text=MODULE)
    page = corpus.docstrings(replace(source, text=MODULE * 6))
    assert page is not None
    assert page.path == "boats.py"
    chats = conversations.conversations([source])
    assert any("Write" in chat.text and "return boat.move" in chat.text for chat in chats)
    held_out = {path for path, _, _ in corpus.builtin_docs() if corpus.is_held_out(path)}
    assert held_out
    for chat in chats:
        assert not any(chat.path.startswith(f"{path}.") for path in held_out)
        assert chat.text.endswith("<|end|>\n")
