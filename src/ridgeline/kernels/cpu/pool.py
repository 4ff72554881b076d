"""The threads that kernels run on."""

import ctypes
import os
import threading

from ridgeline.core.errors import MachineError
from ridgeline.kernels.cpu.library import chosen_level, load_library


class Pool:
    """A pool of threads for one library. Hold `lock` while a kernel runs on it."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self.lock = threading.Lock()
        self.handle = library.rl_pool_new(num_threads)
        if not self.handle:
            raise MachineError(f"This machine gives no {num_threads} threads to compute with.")

    def close(self) -> None:
        """End the threads; the pool is unusable then."""
        if self.handle:
            self.library.rl_pool_free(self.handle)
            self.handle = None


_shared: dict[str, Pool] = {}
_sharing = threading.Lock()


def shared_pool(level: str | None = None) -> Pool:
    """The process's pool, one thread for each core that it may use.

    Engines of one process share it, so that two of them do not spin against each other.
    """
    level = level or chosen_level()
    with _sharing:
        if level not in _shared:
            _shared[level] = Pool(load_library(level), usable_cores())
        return _shared[level]


def usable_cores() -> int:
    """Cores that this process may run on, by affinity and by the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, _quota()))


def _quota() -> int:
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return 1 << 16
    return 1 << 16 if quota == "max" else -(-int(quota) // int(period))
