"""Memory that begins where the kernels want it to."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_LINE_BYTES = 64
_HUGE_PAGE_BYTES = 1 << 21
_LARGE_BYTES = 1 << 22
_MAX_SLAB_BYTES = 1 << 28

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
        found, self._slab = self._slab[:size], self._slab[-(-size // _LINE_BYTES) * _LINE_BYTES :]
        self._num_bytes += size
        return found
