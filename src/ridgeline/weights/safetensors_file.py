"""One safetensors file: shapes and dtypes from its header, tensors as views or by reading.

There are two ways to the data. ``tensor`` maps the file and copies nothing; it is as safe as the
file is left alone, since a page that can no longer be read ends the process (SIGBUS). ``read_into``
uses plain reads, so that a file that shrinks or a disk that fails is an error like any other.
"""

import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np

from ridgeline.core.arrays import Array, empty, numpy_dtype
from ridgeline.core.errors import UnsupportedModelError
from ridgeline.weights.names import short_name
from ridgeline.weights.reading import open_file, read_exactly, unreadable
from ridgeline.weights.safetensors_header import DTYPES, TensorEntry, read_header

# Reads are cut into blocks, so that progress moves and conversion needs only this much beside.
_BLOCK_BYTES = 2 << 20


class SafetensorsFile:
    """An open safetensors file. Close it, or use it in a ``with`` block; views outlive it.

    Raises:
        ModelNotFoundError: there is no such file.
        CorruptFileError: the file contradicts its own header or is cut short.
        DiskError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        self._file, size_bytes = open_file(path)
        try:
            self._entries = read_header(self._file, size_bytes, path.name)
        except OSError as error:
            self.close()
            raise unreadable(path, error) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; tensors that were handed out stay valid."""
        self._file.close()
        self._map = None

    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of their data in the file."""
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor ``name``, without reading it."""
        return self._entries[name].shape

    def num_bytes(self, name: str) -> int:
        """The bytes that tensor ``name`` takes in the file."""
        entry = self._entries[name]
        return entry.stop - entry.start

    def dtype(self, name: str) -> str:
        """The dtype of tensor ``name``.

        Raises:
            UnsupportedModelError: the dtype is one that Ridgeline cannot read.
        """
        found = DTYPES.get(self._entries[name].dtype)
        if found is None:
            raise UnsupportedModelError(
                f"Tensor {short_name(name)} in {self.path.name} has dtype "
                f"{short_name(self._entries[name].dtype)}, which Ridgeline cannot read; "
                f"it reads {', '.join(DTYPES)}."
            )
        return found

    def tensor(self, name: str) -> Array:
        """Tensor ``name`` as a view of the mapped file (a copy where its offset is not aligned).

        The mapping is private: writing to the view does not change the file.

        Raises:
            UnsupportedModelError: the dtype is one that Ridgeline cannot read.
            DiskError: the file cannot be mapped.
        """
        entry, dtype = self._entries[name], self.dtype(name)
        if entry.start == entry.stop:
            return empty(entry.shape, dtype)
        data = np.frombuffer(
            self._mapped(), dtype=np.uint8, count=entry.stop - entry.start, offset=entry.start
        )
        if entry.start % numpy_dtype(dtype).itemsize:
            data = data.copy()
        return data.view(numpy_dtype(dtype)).reshape(entry.shape)

    def read_into(
        self,
        name: str,
        out: Array,
        on_bytes: Callable[[int], None] | None = None,
        *,
        first_row: int = 0,
    ) -> None:
        """Read rows of tensor ``name`` into ``out``, a contiguous array of any dtype.

        ``out`` is overwritten, converted from the file's dtype where they differ. It has the
        tensor's shape but for the number of rows: it is filled from row ``first_row`` on.
        ``on_bytes`` is called with the number of bytes read, block by block.

        Raises:
            UnsupportedModelError: the dtype is one that Ridgeline cannot read.
            CorruptFileError: the file has become shorter since it was opened.
            DiskError: the file cannot be read.
        """
        entry, dtype = self._entries[name], numpy_dtype(self.dtype(name))
        assert out.flags.c_contiguous
        assert out.shape[1:] == entry.shape[1:]
        assert not entry.shape or first_row + len(out) <= entry.shape[0]
        start = first_row * math.prod(entry.shape[1:])
        flat, step = out.reshape(-1), _BLOCK_BYTES // dtype.itemsize
        same = out.dtype == dtype
        block = flat if same else np.empty(min(step, flat.size), dtype=dtype)
        for first in range(0, flat.size, step):
            target = flat[first : first + step]
            source = target if same else block[: target.size]
            self._read(entry, (start + first) * dtype.itemsize, source)
            if not same:
                target[...] = source
            if on_bytes is not None:
                on_bytes(source.nbytes)

    def _read(self, entry: TensorEntry, offset: int, out: Array) -> None:
        """Fill the contiguous ``out`` from ``offset`` bytes into the data of ``entry``."""
        buffer = out.view(np.uint8).data
        read_exactly(self._file, self.path, entry.start + offset, buffer)

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            try:
                # ACCESS_COPY gives a writable buffer; what is written stays in this process.
                self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise unreadable(self.path, error) from None
        return self._map
