"""Sources of permissively licensed packages, read from the wheels that ``packages.txt`` pins."""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from recipes.embedded.corpus import MAX_FILE_BYTES, Document, is_table, parse

PINNED = Path(__file__).with_name("packages.txt")
MAX_PACKAGE_BYTES = 4_000_000
_MIN_CHARS = 400
_SKIPPED_PARTS = frozenset(
    [
        "_distutils",
        "_vendor",
        "_vendored",
        "extern",
        "externals",
        "lib2to3",
        "locale",
        "locales",
        "migrations",
        "providers",
        "third_party",
        "typeshed",
        "vendor",
        "vendored",
    ]
)
_TEST_PARTS = frozenset({"test", "tests", "testing", "benchmarks"})


def download(folder: Path) -> None:
    """Fetches the pinned wheels into ``folder`` with pip, without their dependencies."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--requirement", str(PINNED), "--dest", str(folder)]
    subprocess.run(command, check=True)


def pinned_wheels(folder: Path) -> list[Path]:
    """The wheels in ``folder`` that ``packages.txt`` names, in its order."""
    wheels = {_key(*file.name.split("-")[:2]): file for file in folder.glob("*.whl")}
    pins = [line.split("#")[0].strip() for line in PINNED.read_text(encoding="utf-8").splitlines()]
    return [wheels[_key(*pin.split("=="))] for pin in pins if pin]


def _key(name: str, version: str) -> tuple[str, str]:
    return name.lower().replace("-", "_").replace(".", "_"), version


def _place(path: str) -> bytes:
    return hashlib.sha256(path.encode()).digest()


def wheel_sources(wheel: Path) -> Iterator[Document]:
    """Modules of one wheel that parse, without tests: at most 4 MB, chosen by hashes of paths."""
    size = 0
    with zipfile.ZipFile(wheel) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        for path in sorted(entries, key=_place):
            parts = set(path.split("/")[:-1])
            name = path.rsplit("/", 1)[-1]
            if not path.endswith(".py") or parts & (_SKIPPED_PARTS | _TEST_PARTS):
                continue
            if entries[path].file_size > MAX_FILE_BYTES or name.startswith(("test_", "conftest")):
                continue
            text = archive.read(path).decode("utf-8", errors="replace").replace("\r\n", "\n")
            if len(text) < _MIN_CHARS or "\ufffd" in text or is_table(text) or parse(text) is None:
                continue
            size += len(text)
            if size > MAX_PACKAGE_BYTES:
                return
            yield Document(kind="packages", path=path, text=text)
