"""Ranks of one host that exchange rows through memory that all of them have mapped."""

import ctypes
import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ridgeline.core.arrays import Array
from ridgeline.core.errors import EngineError, MachineError
from ridgeline.kernels.cpu.library import load_library
from ridgeline.kernels.cpu.pool import Pool

SLOT_BYTES = 1 << 21  # of what a rank sends at once; two of them for each


def shared_memory(num_ranks: int) -> int:
    """A descriptor of memory for a group, which has no name and goes with its last user.

    Raises:
        MachineError: there is none.
    """
    try:
        descriptor = os.memfd_create("ridgeline-ranks")
        os.ftruncate(descriptor, load_library().rl_group_bytes(num_ranks, SLOT_BYTES))
    except OSError as error:
        raise MachineError(f"No memory for ranks to share: {error.strerror}.") from error
    return descriptor


class RankGroup:
    """One rank's end. All ranks make the same calls in the same order, and wait for each other.

    Who waits for a rank that has ended waits for ever: whoever started the ranks ends them all.

    Args:
        pool: of the rank's own, on which its model runs, too; the lock is the caller's to hold.
        descriptor: of `shared_memory`; may be closed afterwards.
    """

    def __init__(self, pool: Pool, descriptor: int, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks, self.pool = rank, num_ranks, pool
        self._library = pool.library
        self._memory = mmap.mmap(descriptor, 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.handle = self._library.rl_group_new(address, rank, num_ranks, SLOT_BYTES)
        if not self.handle:
            raise MachineError("No memory for a group of ranks.")

    def gather(self, own: Array, borders: Sequence[int], whole: Array | None = None) -> Array:
        """Rows ``[T, W]`` of which rank r has columns ``[borders[r], borders[r + 1])``; ``own`` are
        this rank's, of the same type on all ranks. ``whole`` is where they go, if it is given."""
        own = np.ascontiguousarray(own)
        if whole is None:
            whole = np.empty((len(own), borders[-1]), dtype=own.dtype)
        first = np.array(borders, dtype=np.int64) * own.itemsize
        failed = self._library.rl_gather(
            self.handle, self.pool.handle, own.ctypes.data, own.strides[0], whole.ctypes.data,
            whole.strides[0], first.ctypes.data, len(own),
        )  # fmt: skip
        return self._checked(whole, failed)

    def gather_rows(self, rows: Array, owners: npt.NDArray[np.int32]) -> Array:
        """``rows[T, W]``, each as rank ``owners[t]`` has it."""
        rows = rows.copy(order="C")
        owners = np.ascontiguousarray(owners, dtype=np.int32)
        failed = self._library.rl_gather_rows(
            self.handle, self.pool.handle, rows.ctypes.data, rows.strides[0], rows.strides[0],
            owners.ctypes.data, len(rows),
        )  # fmt: skip
        return self._checked(rows, failed)

    def counts(self) -> tuple[int, int]:
        """Bytes that this rank has sent to the others, and calls, so far."""
        found = (ctypes.c_int64 * 2)()
        size = ctypes.sizeof(ctypes.c_int64)
        self._library.rl_group_counts(self.handle, found, ctypes.byref(found, size))
        return found[0], found[1]

    @staticmethod
    def _checked(rows: Array, failed: int) -> Array:
        if failed:
            raise EngineError("Ranks could not exchange their rows: one is too wide.")
        return rows
