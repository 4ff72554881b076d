"""Writing GGUF files: all of the header first, then the rows of any tensor in any order.

Files have temporary names until all of them are complete and on the disk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import numpy as np

from ridgeline.quant.gguf_blocks import Bytes
from ridgeline.quant.gguf_formats import GGUF_FORMATS, GGUFFormat
from ridgeline.weights.gguf.header import DEFAULT_ALIGNMENT, MAGIC
from ridgeline.weights.gguf.shards import part_names
from ridgeline.weights.gguf.values import encode_value
from ridgeline.weights.temporary import NewFile, publish, refuse_existing, temporary_name

_VERSION = 3
_NUMBERS = {fmt.name: number for number, fmt in GGUF_FORMATS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """A tensor to be written: its name, format and shape (slowest axis first)."""

    name: str
    format: GGUFFormat
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of the last axis; the elements of a vector are its rows."""
        return self.format.num_bytes(self.shape[-1] if len(self.shape) > 1 else 1)

    @property
    def num_bytes(self) -> int:
        """The bytes of all rows."""
        return self.format.num_bytes(prod(self.shape))


class GGUFWriter:
    """Writes one GGUF file, or several of at most ``split_max_bytes`` of tensors each.

    Use it in a ``with`` block: at its end the files get their names, if all tensors are whole; an
    exception leaves nothing behind. The files of a split are ``NAME-00001-of-00003.gguf`` and so
    on for ``path`` ``NAME.gguf``.

    Raises:
        InvalidRequestError: there is such a file already.
        DiskError: a file cannot be written, or the disk has no room for it.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, object],
        tensors: Sequence[GGUFTensor],
        *,
        split_max_bytes: int | None = None,
    ) -> None:
        parts = _parts(tensors, split_max_bytes)
        self.paths = _paths(path, len(parts))
        for each in (path, *self.paths):
            refuse_existing(each)
        self._files: list[NewFile] = []
        self._place: dict[str, tuple[int, int]] = {}  # tensor to its file and offset
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._missing = {tensor.name: tensor.num_bytes for tensor in tensors}
        try:
            for number, part in enumerate(parts):
                keys = dict(metadata) if number == 0 else {}
                if len(parts) > 1:
                    keys |= {
                        "split.no": np.uint16(number),
                        "split.count": np.uint16(len(parts)),
                        "split.tensors.count": np.int32(len(tensors)),
                    }
                self._begin(number, keys, part)
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                assert not any(self._missing.values()), self._missing
                written = [file.path for file in self._files]
                while self._files:
                    self._files.pop().close(sync=True)
                for temporary, path in zip(written, self.paths, strict=True):
                    publish(temporary, path)
        finally:
            self._discard()

    def write(self, name: str, first_row: int, blocks: Bytes) -> None:
        """Write rows of a tensor, uint8 ``[R, row_bytes]``; leading axes count as rows."""
        tensor, (file, offset) = self._tensors[name], self._place[name]
        assert blocks.shape[1] == tensor.row_bytes
        data = np.ascontiguousarray(blocks).reshape(-1)
        self._missing[name] -= data.nbytes
        self._files[file].write(data.data, offset + first_row * tensor.row_bytes)

    def _begin(
        self, number: int, metadata: Mapping[str, object], tensors: Sequence[GGUFTensor]
    ) -> None:
        """Create a file with its header, as long as it will be."""
        header = bytearray(MAGIC)
        header += _unsigned(_VERSION, 4) + _unsigned(len(tensors), 8)
        header += _unsigned(len(metadata), 8)
        for key, value in metadata.items():
            header += _text(key) + encode_value(value)
        offset, offsets = 0, []
        for tensor in tensors:
            header += _text(tensor.name) + _unsigned(len(tensor.shape), 4)
            header += b"".join(_unsigned(extent, 8) for extent in reversed(tensor.shape))
            header += _unsigned(_NUMBERS[tensor.format.name], 4) + _unsigned(offset, 8)
            offsets.append(offset)
            offset = _aligned(offset + tensor.num_bytes)
        start = _aligned(len(header))
        self._files.append(NewFile(temporary_name(self.paths[number]), start + offset))
        self._files[number].write(memoryview(header), 0)
        for tensor, tensor_offset in zip(tensors, offsets, strict=True):
            self._place[tensor.name] = number, start + tensor_offset

    def _discard(self) -> None:
        for file in self._files:
            file.close(sync=False)
            file.path.unlink(missing_ok=True)
        self._files = []


def _parts(tensors: Sequence[GGUFTensor], limit: int | None) -> list[list[GGUFTensor]]:
    """Tensors in order, a new file where the next one would be too much."""
    parts: list[list[GGUFTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if limit is not None and size and size + tensor.num_bytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.num_bytes
    return parts


def _paths(path: Path, count: int) -> list[Path]:
    if count == 1:
        return [path]
    first = f"{path.name.removesuffix('.gguf')}-00001-of-{count:05}.gguf"
    return [path.with_name(name) for name in part_names(first)]


def _aligned(offset: int) -> int:
    return -(-offset // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _unsigned(value: int, num_bytes: int) -> bytes:
    return value.to_bytes(num_bytes, "little")


def _text(text: str) -> bytes:
    data = text.encode()
    return _unsigned(len(data), 8) + data
