import zipfile
from pathlib import Path

from recipes.embedded import documentation, functions, packages
from recipes.embedded.corpus import Document
from recipes.embedded.deduplication import without_repetitions

CODE = "\n\n".join(f"def double_{i}(value):\n    return value + value + {i}" for i in range(20))


def document(text: str, path: str = "a.py") -> Document:
    return Document(kind="packages", path=path, text=text)


def test_equal_texts_are_kept_once_whatever_their_white_space() -> None:
    texts = [
        document(CODE),
        document(CODE.replace("\n", "\n\n"), "b.py"),
        document("x = 1", "c.py"),
    ]
    kept = without_repetitions(texts, held_out=[document("nothing of this is there")])
    assert [each.path for each in kept] == ["a.py", "c.py"]


def test_texts_that_repeat_held_out_ones_are_left_out() -> None:
    held_out = document(
        "\n".join(f"line number {i} of a text that nobody may see" for i in range(9))
    )
    copy = document(CODE + "\n" + held_out.text, "copy.py")
    kept = without_repetitions([document(CODE), copy], held_out=[held_out])
    assert [each.path for each in kept] == ["a.py"]


def test_wheels_give_modules_that_parse_without_tests_and_copies_of_others(tmp_path: Path) -> None:
    wheel = tmp_path / "boats-1.0-py3-none-any.whl"
    names = ("boats/sail.py", "boats/tests/sail.py", "boats/_vendor/six.py", "boats/test_sail.py")
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, CODE)
        archive.writestr("boats/broken.py", CODE + "\ndef")
        archive.writestr("boats/short.py", "x = 1")
    assert [each.path for each in packages.wheel_sources(wheel)] == ["boats/sail.py"]


def test_every_pin_has_a_version_and_a_licence() -> None:
    pins = packages.PINNED.read_text(encoding="utf-8").splitlines()
    assert len(pins) > 100
    for pin in pins:
        requirement, _, licence = pin.partition("  # ")
        name, _, version = requirement.partition("==")
        assert name
        assert version
        assert licence
        assert "GPL" not in licence


def test_roles_of_documentation_become_code() -> None:
    text = (
        ".. index:: thing\n\nSee :func:`open`, :meth:`~io.IOBase.close` and :ref:`this <label>`.\n"
    )
    assert documentation.plain(text) == "See ``open``, ``io.IOBase.close`` and ``this``.\n"


def test_sections_are_cut_before_headings_and_lose_nothing() -> None:
    text = "\n\n".join(f"Heading {i}\n=========\n\n" + "Some words here.\n" * 120 for i in range(6))
    parts = list(documentation.sections(text))
    assert len(parts) > 2
    assert all(part.startswith("Heading") for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


def test_short_functions_become_documents_once_without_indentation_and_decorators() -> None:
    method = (
        "    @property\n"
        "    def area(self):\n"
        '        """Return the area of the rectangle."""\n'
        "        return self.width * self.height\n"
    )
    long = "def long():\n" + "    print('a line of many')\n" * 40
    source = f"class A:\n{method}\nclass B:\n{method}\ndef f(): return 1\n\n{long}"
    made = list(functions.functions([Document(kind="library", path="a.py", text=source)]))
    assert [each.path for each in made] == ["a.py#area@3"]
    assert made[0].text.startswith('def area(self):\n    """Return')
    assert made[0].text.endswith("height\n")


def test_functions_of_prose_and_of_broken_sources_are_none() -> None:
    text = "def area(width, height):\n    return width * height + 0 * width\n"
    sources = [("topics", text), ("library", text + "def"), ("library", text)]
    documents = [Document(kind=kind, path="a.py", text=each) for kind, each in sources]
    assert [each.text for each in functions.functions(documents)] == [text]
