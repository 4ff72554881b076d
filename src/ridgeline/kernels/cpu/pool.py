"""The threads that kernels run on."""

import ctypes
import threading

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import MachineError
from ridgeline.core.host import usable_cores
from ridgeline.kernels.cpu.library import chosen_level, load_library
from ridgeline.kernels.cpu.structs import SPAN


class Pool:
    """A pool of threads for one library. Hold `lock` while a kernel runs on it."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self.library = library
        self.level = library.rl_isa_name().decode()
        self.num_threads = num_threads
        self.lock = threading.Lock()
        self._num_recording = 0  # who have asked for it
        self.handle = library.rl_pool_new(num_threads)
        if not self.handle:
            raise MachineError(f"This machine gives no {num_threads} threads to compute with.")

    def record(self, on: bool) -> None:
        """Have what runs on the pool timed from now on, or no longer if nobody else has asked."""
        with self.lock:
            self._num_recording += 1 if on else -1
            if self._num_recording == on:  # the first one, or none any more
                self.library.rl_record(self.handle, on)

    @property
    def is_recording(self) -> bool:
        return self._num_recording > 0

    def take_spans(self) -> npt.NDArray[np.void]:
        """What was recorded since the last call (`structs.SPAN`); with the lock held."""
        spans = np.empty(self.library.rl_num_spans(self.handle), dtype=SPAN)
        self.library.rl_take_spans(self.handle, spans.ctypes.data)
        return spans

    def close(self) -> None:
        """End the threads; the pool is unusable then."""
        if self.handle:
            self.library.rl_pool_free(self.handle)
            self.handle = None


_shared: dict[str, Pool] = {}
_sharing = threading.Lock()


def shared_pool(level: str | None = None) -> Pool:
    """The process's pool, one thread for each processor that it may use.

    Engines of one process share it, so that two of them do not spin against each other.
    """
    level = level or chosen_level()
    with _sharing:
        if level not in _shared:
            _shared[level] = Pool(load_library(level), usable_cores())
        return _shared[level]
