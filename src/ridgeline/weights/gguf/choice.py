"""Which GGUF file of a folder or repository is meant, by the name of its quantization."""

import re
from collections.abc import Collection, Iterable

from ridgeline.core.errors import CorruptFileError, ModelNotFoundError
from ridgeline.weights.gguf.shards import part_names, split_name
from ridgeline.weights.names import short_name

_QUANTIZATION = re.compile(
    r"(?:^|[-._])(?P<name>(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|FP?16|FP?32|MXFP4\w*))$", re.IGNORECASE
)
_NOT_MODELS = ("mmproj", "imatrix")
_MAX_LISTED = 40


def gguf_names(names: Iterable[str]) -> list[str]:
    """The first parts of the language models among some file names, with or without folders."""
    found = []
    for name in sorted(names):
        base = name.rpartition("/")[2]
        split = split_name(base)
        is_model = base.lower().endswith(".gguf") and not base.lower().startswith(_NOT_MODELS)
        if is_model and (split is None or split[1] == 1):
            found.append(name)
    return found


def quantization_of(name: str) -> str:
    """What a file's name says of its quantization, e.g. ``Q4_K_M``; its stem if nothing."""
    base = name.rpartition("/")[2]
    split = split_name(base)
    stem = base[: -len(".gguf")] if split is None else split[0]
    match = _QUANTIZATION.search(stem)
    return stem if match is None else match["name"].upper()


def choose_gguf(names: Collection[str], quantization: str | None, where: str) -> list[str]:
    """All parts of the file with ``quantization``, or of the only file, among ``names``.

    Raises:
        ModelNotFoundError: there is none, or more than one; lists the quantizations that there are.
        CorruptFileError: a part is missing.
    """
    models = gguf_names(names)
    if not models:
        raise ModelNotFoundError(f"{where} has no GGUF file.")
    found = [
        name
        for name in models
        if quantization is None or quantization_of(name).upper() == quantization.upper()
    ]
    if len(found) != 1:
        listed = sorted({quantization_of(name) for name in models})
        shown = ", ".join(short_name(name)[1:-1] for name in listed[:_MAX_LISTED])
        more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
        what = "several GGUF files" if quantization is None else f"no single {quantization}"
        raise ModelNotFoundError(f"{where} has {what}; name one after a colon, of {shown}{more}.")
    folder, slash, base = found[0].rpartition("/")
    parts = [f"{folder}{slash}{part}" for part in part_names(base)]
    missing = [part for part in parts if part not in names]
    if missing:
        raise CorruptFileError(
            f"{where} lacks {len(missing)} of the {len(parts)} parts of {short_name(found[0])}."
        )
    return parts
