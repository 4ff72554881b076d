"""Writing safetensors: a file tensor by tensor, or a folder row by row.

Files and folders have temporary names until all in them is complete and on the disk.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np

from ridgeline.core.arrays import Array, numpy_dtype
from ridgeline.weights.files import INDEX_NAME, SINGLE_NAME
from ridgeline.weights.rows_writer import RowsWriter, split_by_size
from ridgeline.weights.safetensors_header import DTYPES
from ridgeline.weights.temporary import (
    publish,
    refuse_existing,
    temporary_name,
    unwritable,
    write_durably,
    write_json,
)

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
_BLOCK_BYTES = 1 << 24
_SHARD_BYTES = 5 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsTensor:
    """A tensor to be written: its name, dtype (as the format names it) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """The bytes of one entry of the first axis."""
        return prod(self.shape[1:]) * numpy_dtype(DTYPES[self.dtype]).itemsize

    @property
    def num_bytes(self) -> int:
        """The bytes of all elements."""
        return prod(self.shape) * numpy_dtype(DTYPES[self.dtype]).itemsize


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> str:
    """Write ``tensors`` in the given order, and return the file's SHA-256; see `write_tensors`."""
    described = [
        SafetensorsTensor(name=name, dtype=_NAMES[values.dtype.name], shape=values.shape)
        for name, values in tensors.items()
    ]
    return write_tensors(path, described, tensors.values())


def write_tensors(
    path: Path,
    tensors: Sequence[SafetensorsTensor],
    values: Iterable[Array],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Write the ``values`` of tensors as they come, and return the file's SHA-256.

    Views of mapped files are copied block by block.

    Raises:
        DiskError: it cannot be written; nothing is left of it.
    """
    digest = hashlib.sha256()

    def blocks() -> Iterator[bytes | memoryview]:
        yield _header(tensors, metadata)[0]
        for array in values:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            for first in range(0, len(data), _BLOCK_BYTES):
                yield data[first : first + _BLOCK_BYTES]

    def hashed() -> Iterator[bytes | memoryview]:
        for block in blocks():
            digest.update(block)
            yield block

    write_durably(path, hashed())
    return digest.hexdigest()


class SafetensorsWriter(RowsWriter[SafetensorsTensor]):
    """Writes a folder with one safetensors file, or several with an index.

    ``folder`` is where it is until it gets its name: other files may be put there.

    Raises:
        InvalidRequestError: there is something at ``path`` already.
        DiskError: a file cannot be written, or the disk has no room for it.
    """

    def __init__(
        self, path: Path, tensors: Sequence[SafetensorsTensor], *, shard_bytes: int = _SHARD_BYTES
    ) -> None:
        super().__init__(tensors)
        refuse_existing(path)
        self.path, self.folder = path, temporary_name(path)
        try:
            self.folder.mkdir()
        except OSError as error:
            raise unwritable(path, error) from None
        try:
            self._begin_shards(split_by_size(tensors, shard_bytes))
        except BaseException:
            self._discard()
            raise

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._tensors[name].shape

    def _begin_shards(self, shards: Sequence[Sequence[SafetensorsTensor]]) -> None:
        count = len(shards)
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            name = SINGLE_NAME if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            header, offsets, size = _header(shard)
            self._begin(self.folder / name, header, offsets, size)
            weight_map |= dict.fromkeys(offsets, name)
        if count > 1:
            total = sum(tensor.num_bytes for tensor in self._tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(self.folder / INDEX_NAME, index)

    def _publish(self) -> None:
        publish(self.folder, self.path)

    def _discard(self) -> None:
        super()._discard()
        shutil.rmtree(self.folder, ignore_errors=True)


def _header(
    tensors: Iterable[SafetensorsTensor], metadata: Mapping[str, str] = MappingProxyType({})
) -> tuple[bytes, dict[str, int], int]:
    """The bytes before the tensors, the offset of each after them, and the size of all."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offsets: dict[str, int] = {}
    offset = 0
    for tensor in tensors:
        offsets[tensor.name] = offset
        offset += tensor.num_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offsets[tensor.name], offset],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, offsets, offset
