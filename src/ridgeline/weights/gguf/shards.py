"""Files that belong together: ``name-00001-of-00003.gguf`` and so on.

Each part is a GGUF file of its own; the first has all metadata. ``split.no`` (from zero),
``split.count`` and ``split.tensors.count`` say what belongs together.
Source: ``gguf-split`` of llama.cpp.
"""

import re
from pathlib import Path

from ridgeline.core.errors import CorruptFileError, ModelNotFoundError
from ridgeline.weights.gguf.file import GGUFFile
from ridgeline.weights.names import list_some, short_name

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_MAX_PARTS = 1000


def split_name(name: str) -> tuple[str, int, int] | None:
    """Stem, number (from one) and count of a part by its file name, or ``None``."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    return match["stem"], int(match["number"]), int(match["count"])


def part_names(name: str) -> list[str]:
    """The names of all parts of the model that file ``name`` belongs to, in order."""
    split = split_name(name)
    if split is None:
        return [name]
    stem, _, count = split
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def open_parts(path: Path) -> list[GGUFFile]:
    """All files of the model that ``path`` is a part of, the first one first.

    Raises:
        ModelNotFoundError: a part is missing; names it.
        CorruptFileError: parts do not belong together; or as `GGUFFile`.
    """
    split = split_name(path.name)
    if split is not None and not 1 <= split[1] <= split[2] <= _MAX_PARTS:
        raise CorruptFileError(f"{short_name(path.name)} is not the name of a part of a GGUF file.")
    names = part_names(path.name)
    missing = [name for name in names if not (path.parent / name).exists()]
    if missing and split is not None:
        raise ModelNotFoundError(
            f"{len(missing)} of the {len(names)} parts of {short_name(path.name)} are missing: "
            f"{list_some(missing)}."
        )
    files: list[GGUFFile] = []
    try:
        for name in names:
            files.append(GGUFFile(path.parent / name))
        _check(files)
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _check(files: list[GGUFFile]) -> None:
    """Every part must be the one that its name says, and all tensors there, each once."""
    for index, file in enumerate(files):
        count, number = file.metadata.get("split.count", 1), file.metadata.get("split.no", 0)
        if (count or 1) != len(files) or number != index:
            raise CorruptFileError(
                f"{short_name(file.path.name)} is not part {index + 1} of {len(files)} by its own "
                "metadata."
            )
    total = sum(len(file.tensors) for file in files)
    if len(files) > 1 and files[0].metadata.get("split.tensors.count", total) != total:
        raise CorruptFileError(
            f"The parts of {short_name(files[0].path.name)} have {total} tensors, and not "
            "split.tensors.count of them."
        )
    if len({name for file in files for name in file.tensors}) != total:
        raise CorruptFileError(f"A tensor is in two parts of {short_name(files[0].path.name)}.")
