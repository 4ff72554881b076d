"""Python's own documentation (reStructuredText, PSF licence) out of Debian's package of it."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from recipes.embedded.corpus import Document, is_table

PACKAGE = "python3.11-doc"
_SOURCES = f"usr/share/doc/{PACKAGE.removesuffix('-doc')}/html/_sources"
_SKIPPED = ("whatsnew/changelog", "c-api/", "extending/")
_UNDERLINE = re.compile(r"^([=\-*~^\"#+])\1{2,}$")
_ROLE = re.compile(r":(?:[\w+-]+:)*[\w+-]+:`[~!]?([^`<]*?)(?:\s*<[^`>]*>)?`")
_SECTION_CHARS = 6_000


def download(folder: Path) -> None:
    """Fetches and unpacks the package below ``folder`` (apt-get, dpkg)."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "--quiet", PACKAGE], cwd=folder, check=True)
    (archive,) = folder.glob(f"{PACKAGE}_*.deb")
    subprocess.run(["dpkg", "-x", str(archive), str(folder)], check=True)


def plain(text: str) -> str:
    """Roles become the code that they name, and invisible directives go."""
    text = _ROLE.sub(r"``\1``", text)
    kept = [
        line
        for line in text.split("\n")
        if not line.startswith((".. index::", ".. _", ".. moduleauthor", ".. sectionauthor"))
    ]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept)).strip() + "\n"


def sections(text: str) -> Iterator[str]:
    """The text in pieces of about 6,000 characters at most, cut before a heading where one is."""
    lines = text.split("\n")
    heads = [
        i - 1
        for i, line in enumerate(lines)
        if i and _UNDERLINE.match(line) and lines[i - 1].strip()
    ]
    part: list[str] = []
    size = 0
    for i, line in enumerate(lines):
        if part and size > _SECTION_CHARS / 2 and (i in heads or size > 2 * _SECTION_CHARS):
            yield "\n".join(part).strip() + "\n"
            part, size = [], 0
        part.append(line)
        size += len(line) + 1
    yield "\n".join(part).strip() + "\n"


def pages(folder: Path) -> Iterator[Document]:
    """The documentation's sections in sorted order, below the unpacked package."""
    root = folder / _SOURCES
    for file in sorted(root.rglob("*.rst.txt")):
        path = file.relative_to(root).as_posix()
        if path.startswith(_SKIPPED):
            continue
        text = plain(file.read_text(encoding="utf-8").replace("\r\n", "\n"))
        for i, section in enumerate(sections(text)):
            if len(section) > 200 and not is_table(section):
                yield Document(kind="documentation", path=f"Doc/{path}#{i}", text=section)
