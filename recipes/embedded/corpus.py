"""The embedded model's text: what the running interpreter's standard library carries.

A document is code or prose. Whether it is held out depends on its path alone, so every text that
is derived from a held-out file (its docstrings, chats about it) is held out too.
"""

import ast
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

HELD_OUT_PER_MILLE = 30
MAX_FILE_BYTES = 320_000
MAX_LINE_CHARS = 400

CODE_KINDS = ("library", "tests")
PROSE_KINDS = ("topics", "docstrings", "text")

_SKIPPED_PARTS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "_bundled", "crashers"}
)
_SKIPPED_PREFIXES = ("encodings/", "lib2to3/tests/data/", "pydoc_data/", "test/cjkencodings/")
_TEXT_FILES = ("LICENSE.txt", "idlelib/README.txt", "idlelib/extend.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text. ``path``: relative to the library folder, with ``#part`` for a part of a file."""

    kind: str
    path: str
    text: str


def is_held_out(path: str) -> bool:
    """True for about 3% of paths: SHA-256 of the path, first 8 bytes, modulo 1000, below 30."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def library_folder() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_table(text: str) -> bool:
    """True for data written as source: many digits, few letters, or very long lines."""
    if max(map(len, text.splitlines()), default=0) > MAX_LINE_CHARS:
        return True
    num_digits = sum(text.count(digit) for digit in "0123456789")
    num_ascii = len(text.encode("ascii", errors="ignore"))
    return num_digits > 0.15 * len(text) or num_ascii < 0.97 * len(text)


def _read(path: Path) -> str | None:
    if path.stat().st_size > MAX_FILE_BYTES:
        return None
    try:
        return path.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\f", "")
    except UnicodeDecodeError:
        return None


def source_files(folder: Path) -> Iterator[Document]:
    """Modules under ``folder`` in sorted order, data tables and installed packages left out."""
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder).as_posix()
        if _SKIPPED_PARTS & set(path.split("/")) or path.startswith(_SKIPPED_PREFIXES):
            continue
        if path.startswith("_sysconfigdata"):
            continue
        text = _read(file)
        if text is None or len(text) < 200 or is_table(text):
            continue
        is_test = "test" in path.split("/")[0] or "tests" in path.split("/")
        yield Document(kind="tests" if is_test else "library", path=path, text=text)


def topics() -> Iterator[Document]:
    """The language reference that ``help()`` prints, one document per topic."""
    from pydoc_data.topics import topics as table

    for name in sorted(table):
        yield Document(kind="topics", path=f"pydoc_data/topics.py#{name}", text=table[name])


def text_files(folder: Path) -> Iterator[Document]:
    """The few plain-text documents beside the modules."""
    for name in _TEXT_FILES:
        file = folder / name
        if file.is_file():
            yield Document(kind="text", path=name, text=file.read_text(encoding="utf-8"))


def parse(text: str) -> ast.Module | None:
    """The module's syntax tree, or ``None`` for sources that are broken on purpose."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _entries(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            doc = ast.get_docstring(child)
            if doc:
                yield f"class {prefix}{child.name}\n\n{doc}"
            yield from _entries(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(child)
            if doc and len(doc) > 30:
                yield f"{prefix}{child.name}({ast.unparse(child.args)})\n\n{doc}"


def docstrings(source: Document) -> Document | None:
    """The docstrings of one module as a page of prose, or ``None`` where there are hardly any."""
    tree = parse(source.text)
    if tree is None:
        return None
    module = source.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    head = ast.get_docstring(tree)
    pages = ([f"{module}\n\n{head}"] if head else []) + list(_entries(tree, f"{module}."))
    text = "\n\n\n".join(pages) + "\n"
    if len(text) < 300 or is_table(text):
        return None
    return Document(kind="docstrings", path=source.path, text=text)


def builtin_docs() -> Iterator[tuple[str, str, str]]:
    """(path, qualified name, docstring) of what is written in C; held out class by class."""
    for module_name in sorted({"builtins", *sys.builtin_module_names}):
        if module_name.startswith("_") and module_name not in {"_collections", "_functools", "_io"}:
            continue
        module = import_module(module_name)
        public = "" if module_name == "builtins" else module_name.lstrip("_") + "."
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or not (inspect.isclass(value) or inspect.isbuiltin(value)):
                continue
            path = f"{module_name}#{name}"
            doc = inspect.getdoc(value)
            if doc:
                yield path, f"{public}{name}", doc
            if inspect.isclass(value):
                for member, method in sorted(vars(value).items()):
                    text = None if member.startswith("_") else inspect.getdoc(method)
                    if text:
                        yield path, f"{public}{name}.{member}", text


def builtin_pages() -> Iterator[Document]:
    """Docstrings of C code as prose, one document per class or function path."""
    pages: dict[str, list[str]] = {}
    for path, name, doc in builtin_docs():
        pages.setdefault(path, []).append(f"{name}\n\n{doc}")
    for path, texts in pages.items():
        yield Document(kind="docstrings", path=path, text="\n\n\n".join(texts) + "\n")


def collect(folder: Path) -> list[Document]:
    """Every document of code and prose, training and held out, in a fixed order."""
    sources = list(source_files(folder))
    pages = [page for source in sources if (page := docstrings(source)) is not None]
    return [*sources, *topics(), *text_files(folder), *pages, *builtin_pages()]


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held out), by ``is_held_out`` of each path."""
    training = [document for document in documents if not is_held_out(document.path)]
    return training, [document for document in documents if is_held_out(document.path)]
