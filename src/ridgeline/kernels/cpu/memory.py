"""Memory that begins where the kernels want it to."""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ridgeline.core.rounding import round_up

_LINE_BYTES = 64
_HUGE_PAGE_BYTES = 1 << 21
_LARGE_BYTES = 1 << 22
_MAX_SLAB_BYTES = 1 << 28
_POPULATE_READ = 22  # Linux 5.14
_PAGE_OUT = 21  # Linux 5.4
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

Bytes = npt.NDArray[np.uint8]
Allocate = Callable[[int], Bytes]


def aligned_bytes(size: int) -> Bytes:
    """Uninitialised memory that begins at a cache line, or at a huge page if it is large."""
    alignment = _LINE_BYTES if size < _LARGE_BYTES else _HUGE_PAGE_BYTES
    raw = np.empty(size + alignment, dtype=np.uint8)
    offset = -raw.ctypes.data % alignment
    return raw[offset : offset + size]


class Slabs:
    """Memory for the many matrices of a model, each from a cache line on.

    They lie one after the other in slabs, which begin at huge pages. Memory of its own for each
    would lose up to a huge page beside every one of them. A slab is freed with the last of them.
    """

    def __init__(self) -> None:
        self._slab = aligned_bytes(0)
        self._num_bytes = 0

    def allocate(self, size: int) -> Bytes:
        """Uninitialised memory."""
        if size > len(self._slab):
            # Pages that are not used yet take no memory; a small model has a small slab even so.
            usual = min(max(self._num_bytes, _LARGE_BYTES), _MAX_SLAB_BYTES)
            self._slab = aligned_bytes(max(size, usual))
        found, self._slab = self._slab[:size], self._slab[round_up(size, _LINE_BYTES) :]
        self._num_bytes += size
        return found


class FileSlabs:
    """The same in a file of a folder, which has no name and goes with the last of them.

    What was written may leave memory, and comes back when it is read.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (mappings keep it)
        self._num_bytes = 0
        self._last: mmap.mmap | None = None

    def allocate(self, size: int) -> Bytes:
        """Zeroed memory.

        Raises:
            OSError: the disk is full.
        """
        if self._last is not None:
            self._last.madvise(mmap.MADV_DONTNEED)  # which the file keeps
        start = self._num_bytes
        self._num_bytes += round_up(max(size, 1), mmap.PAGESIZE)
        self._file.truncate(self._num_bytes)
        length = self._num_bytes - start
        self._last = mmap.mmap(self._file.fileno(), length, offset=start)
        return np.frombuffer(self._last, dtype=np.uint8)[:size]


def _pages(array: Bytes) -> tuple[int, int]:
    """Address and bytes of the pages that an array lies in; in a file it has them for itself."""
    first = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    return first, round_up(array.ctypes.data + array.nbytes - first, mmap.PAGESIZE)


def read_pages(arrays: Iterable[Bytes]) -> None:
    """Have the pages of mapped files in memory.

    Raises:
        OSError: the file cannot be read.
    """
    for address, size in map(_pages, arrays):
        _LIBC.madvise(address, size, mmap.MADV_WILLNEED)  # in large pieces, and without waiting
        if _LIBC.madvise(address, size, _POPULATE_READ):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


def drop_pages(arrays: Iterable[Bytes]) -> None:
    """Give pages of mapped files back: not to the cache of files, where the system has that."""
    for address, size in map(_pages, arrays):
        if _LIBC.madvise(address, size, _PAGE_OUT):
            _LIBC.madvise(address, size, mmap.MADV_DONTNEED)
