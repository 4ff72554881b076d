"""Writing GGUF files: all of the header first, then the rows of any tensor in any order.

Files have temporary names until all of them are complete and on the disk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from ridgeline.core.rounding import round_up
from ridgeline.quant.gguf_formats import GGUF_FORMATS, GGUFFormat
from ridgeline.weights.gguf.header import DEFAULT_ALIGNMENT, MAGIC
from ridgeline.weights.gguf.shards import part_names
from ridgeline.weights.gguf.values import encode_value
from ridgeline.weights.rows_writer import RowsWriter, split_by_size
from ridgeline.weights.temporary import publish, refuse_existing, temporary_name

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


class GGUFWriter(RowsWriter[GGUFTensor]):
    """Writes one GGUF file, or several of at most ``split_max_bytes`` of tensors each.

    The files of a split are ``NAME-00001-of-00003.gguf`` and so on for ``path`` ``NAME.gguf``. The
    rows of a tensor are those of all its axes but the last.

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
        super().__init__(tensors)
        parts = split_by_size(tensors, split_max_bytes)
        self.paths = _paths(path, len(parts))
        for each in (path, *self.paths):
            refuse_existing(each)
        try:
            for number, part in enumerate(parts):
                keys = dict(metadata) if number == 0 else {}
                if len(parts) > 1:
                    keys |= {
                        "split.no": np.uint16(number),
                        "split.count": np.uint16(len(parts)),
                        "split.tensors.count": np.int32(len(tensors)),
                    }
                self._begin(temporary_name(self.paths[number]), *_header(keys, part))
        except BaseException:
            self._discard()
            raise

    def _publish(self) -> None:
        published: list[Path] = []
        try:
            for file, path in zip(self._files, self.paths, strict=True):
                publish(file.path, path)
                published.append(path)
        except BaseException:
            for path in published:
                path.unlink(missing_ok=True)
            raise


def _header(
    metadata: Mapping[str, object], tensors: Sequence[GGUFTensor]
) -> tuple[bytes, dict[str, int], int]:
    """The bytes before the tensors, the offset of each after them, and the size of all."""
    header = bytearray(MAGIC)
    header += _unsigned(_VERSION, 4) + _unsigned(len(tensors), 8)
    header += _unsigned(len(metadata), 8)
    for key, value in metadata.items():
        header += _text(key) + encode_value(value)
    offsets: dict[str, int] = {}
    offset = 0
    for tensor in tensors:
        header += _text(tensor.name) + _unsigned(len(tensor.shape), 4)
        header += b"".join(_unsigned(extent, 8) for extent in reversed(tensor.shape))
        header += _unsigned(_NUMBERS[tensor.format.name], 4) + _unsigned(offset, 8)
        offsets[tensor.name] = offset
        offset = _aligned(offset + tensor.num_bytes)
    return bytes(header).ljust(_aligned(len(header)), b"\0"), offsets, offset


def _paths(path: Path, count: int) -> list[Path]:
    if count == 1:
        return [path]
    first = f"{path.name.removesuffix('.gguf')}-00001-of-{count:05}.gguf"
    return [path.with_name(name) for name in part_names(first)]


def _aligned(offset: int) -> int:
    return round_up(offset, DEFAULT_ALIGNMENT)


def _unsigned(value: int, num_bytes: int) -> bytes:
    return value.to_bytes(num_bytes, "little")


def _text(text: str) -> bytes:
    data = text.encode()
    return _unsigned(len(data), 8) + data
