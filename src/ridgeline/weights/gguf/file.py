"""One GGUF file: its header, and the blocks of its tensors.

Plain reads, so that a file that shrinks or a disk that fails is an error like any other.
"""

import math
from pathlib import Path
from typing import Self

import numpy as np

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.quant.gguf_blocks import Bytes
from ridgeline.quant.gguf_formats import GGUF_FORMATS
from ridgeline.quant.gguf_tensor import GGUFBlocks
from ridgeline.weights.gguf.header import GGUFEntry, read_header
from ridgeline.weights.names import short_name
from ridgeline.weights.reading import open_file, read_exactly, unreadable


class GGUFFile:
    """An open GGUF file. Close it, or use it in a ``with`` block.

    Raises:
        ModelNotFoundError: there is no such file.
        CorruptFileError: the file contradicts its own header or is cut short.
        UnsupportedModelError: its version, byte order or a tensor's format is not one that is read.
        DiskError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file, size_bytes = open_file(path)
        try:
            header = read_header(self._file, size_bytes, short_name(path.name))
        except OSError as error:
            self.close()
            raise unreadable(path, error) from None
        except BaseException:
            self.close()
            raise
        self.metadata, self.tensors = header.metadata, header.tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def entry(self, name: str) -> GGUFEntry:
        """Tensor ``name``, which has a format that Ridgeline can expand.

        Raises:
            UnsupportedModelError: it has not.
        """
        entry = self.tensors[name]
        if entry.format.expand is None:
            known = ", ".join(fmt.name for fmt in GGUF_FORMATS.values() if fmt.expand is not None)
            raise UnsupportedModelError(
                f"Tensor {short_name(name)} in {short_name(self.path.name)} has the GGUF format "
                f"{entry.format.name}, which Ridgeline cannot read; take a file whose tensors are "
                f"{known}."
            )
        return entry

    def read_rows(self, name: str, first: int, count: int) -> Bytes:
        """The blocks of some rows, uint8 ``[count, row_bytes]``, in memory of their own."""
        entry = self.tensors[name]
        row_bytes = entry.format.num_bytes(entry.shape[-1])
        start = entry.start + first * row_bytes
        assert start + count * row_bytes <= entry.stop
        data = np.empty((count, row_bytes), dtype=np.uint8)
        read_exactly(self._file, self.path, start, data.reshape(-1).data)
        return data

    def blocks(self, name: str, index: int | None = None) -> GGUFBlocks:
        """Tensor ``name``, or one matrix of a stack, as blocks in memory of their own."""
        entry = self.entry(name)
        shape = entry.shape if index is None else entry.shape[1:]
        rows = math.prod(shape[:-1])
        data = self.read_rows(name, rows * (index or 0), rows)
        return GGUFBlocks(format=entry.format, shape=shape, data=data)
