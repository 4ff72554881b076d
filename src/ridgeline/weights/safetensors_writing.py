"""Writing a safetensors file tensor by tensor, so that it is there as a whole or not at all."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.errors import DiskError
from ridgeline.weights.safetensors_header import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
_BLOCK_BYTES = 1 << 24


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> str:
    """Write ``tensors`` in the given order, and return the file's SHA-256.

    The file has its name only once all of it is on the disk. Views of mapped files are copied
    block by block.

    Raises:
        DiskError: it cannot be written; nothing is left of it.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        stop = offset + tensor.nbytes
        entries[name] = {
            "dtype": _NAMES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    digest = hashlib.sha256()
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for block in (len(header).to_bytes(8, "little"), header):
                digest.update(block)
                file.write(block)
            for tensor in tensors.values():
                data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
                for first in range(0, len(data), _BLOCK_BYTES):
                    digest.update(data[first : first + _BLOCK_BYTES])
                    file.write(data[first : first + _BLOCK_BYTES])
            file.flush()
            os.fsync(file.fileno())
        replace_durably(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise DiskError(f"{path} could not be written: {error.strerror or error}.") from None
    return digest.hexdigest()


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file, there as a whole or not at all.

    Raises:
        DiskError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace_durably(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise DiskError(f"{path} could not be written: {error.strerror or error}.") from None


def replace_durably(temporary: Path, path: Path) -> None:
    """Rename a file whose content is on the disk, and wait until its name is, too."""
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
