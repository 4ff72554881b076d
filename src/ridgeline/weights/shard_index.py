"""The index of a sharded checkpoint: which tensor is in which file."""

import json
from pathlib import Path

from ridgeline.core.errors import CorruptFileError, DiskError
from ridgeline.weights.names import short_name

MAX_INDEX_BYTES = 32 << 20
_MAX_SHARDS = 10_000


def read_index(path: Path) -> dict[str, str]:
    """Tensor name to shard name; the shards are known to be plain names of safetensors files.

    Raises:
        CorruptFileError: the file is not an index, or a name in it leads out of its folder.
        DiskError: the file cannot be read.
    """
    shard_of = _weight_map(path)
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise CorruptFileError(
                f"{path.name} gives tensor {short_name(name)} the file {short_name(str(shard))}, "
                "which is not the name of a .safetensors file in the same folder."
            )
    if len(set(shard_of.values())) > _MAX_SHARDS:
        raise CorruptFileError(f"{path.name} names more than {_MAX_SHARDS} files.")
    return shard_of


def _weight_map(path: Path) -> dict[str, str]:
    try:
        if not path.is_file():
            raise CorruptFileError(f"{path.name} is not a regular file.")
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise CorruptFileError(f"{path.name} is over the limit of {MAX_INDEX_BYTES} bytes.")
        index = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise DiskError(f"{path} could not be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise CorruptFileError(f"{path.name} is not valid JSON in UTF-8.") from None
    shard_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise CorruptFileError(f"{path.name} has no weight_map from tensors to files.")
    return shard_of


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key occurs twice")
    return fields


def _is_plain_name(shard: str) -> bool:
    # ".." cannot pass, having no suffix; printable ASCII keeps out NUL and half characters.
    return (
        shard.endswith(".safetensors")
        and not shard.startswith(".")
        and len(shard) <= 200
        and shard.isascii()
        and shard.isprintable()
        and not any(separator in shard for separator in "/\\:")
    )
