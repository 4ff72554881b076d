"""The threads that kernels run on."""

import ctypes
import math
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ridgeline.core.errors import MachineError
from ridgeline.kernels.cpu.library import chosen_level, load_library


class Pool:
    """A pool of threads for one library. Hold `lock` while a kernel runs on it."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self.library = library
        self.level = library.rl_isa_name().decode()
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
    """The process's pool, one thread for each processor that it may use.

    Engines of one process share it, so that two of them do not spin against each other.
    """
    level = level or chosen_level()
    with _sharing:
        if level not in _shared:
            _shared[level] = Pool(load_library(level), usable_cores())
        return _shared[level]


def usable_cores() -> int:
    """Processors that this process may run on, by affinity and by its control groups' quotas."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, cgroup_cores()))


def cgroup_cores(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int:
    """The least quota of this process's control groups and of those above them, rounded up.

    Both versions are read, of a hierarchy mounted under ``mount``. Without any quota there are more
    cores than a machine has. A container may see its own group at the root, under whatever path.
    """
    quotas: list[float] = [1 << 16]
    with suppress(OSError, ValueError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                roots = {mount}
            elif "cpu" in controllers.split(","):
                roots = {mount / controllers, mount / "cpu"}
            else:
                continue
            inside = PurePosixPath(path.lstrip("/"))
            for root in roots:
                for group in (inside, *inside.parents):
                    quotas += _quotas(root / group)
    return math.ceil(min(quotas))


def _quotas(group: Path) -> Iterator[float]:
    """Cores that one control group may use, by version 2 and by version 1, if it says so."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        yield int(quota) / int(period)  # "max" is no number
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota = (group / "cpu.cfs_quota_us").read_text(encoding="ascii")
        period = (group / "cpu.cfs_period_us").read_text(encoding="ascii")
        if int(quota) > 0:  # -1 where there is none
            yield int(quota) / int(period)
