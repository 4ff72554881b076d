"""The processors that this process may run on, the memory that it may take, and its parent."""

import ctypes
import math
import os
import platform
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

_CPUINFO = Path("/proc/cpuinfo")
_PR_SET_PDEATHSIG = 1
_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES = 1 << 18


def cpu_name() -> str:
    """The processor, as it calls itself."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Processors that this process may run on, by affinity and by its control groups' quotas."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, cgroup_cores()))


def cgroup_cores(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int:
    """The least quota of this process's control groups and of those above them, rounded up.

    Without any quota there are more cores than a machine has.
    """
    quotas = (quota for group in _groups("cpu", membership, mount) for quota in _quotas(group))
    return math.ceil(min(quotas, default=1 << 16))


def available_memory_bytes() -> int:
    """Memory that this process can still take: what the machine has left, its control groups and
    its own limit of address space.

    Beyond a group's limit the kernel ends the process without a word.
    """
    found = [psutil.virtual_memory().available, cgroup_memory_bytes()]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        found.append(limit - psutil.Process().memory_info().vms)
    return max(0, min(found))


def cgroup_memory_bytes(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int:
    """What the control groups leave, files that can be dropped from memory counted as free.

    Without any limit it is more than a machine has.
    """
    rooms = (room for group in _groups("memory", membership, mount) for room in _rooms(group))
    return min(rooms, default=1 << 62)


def die_with(parent: int) -> None:
    """Let the kernel end this process when the parent's thread that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def unmap_freed_blocks() -> None:
    """Have large blocks go back to the system as they are freed.

    glibc keeps what it takes for small, anything up to 32 MiB once such was freed: layers that
    come and go would leave holes of a whole model's size.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):  # musl has none
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def how_it_ended(code: int) -> str:
    """A sentence on a child's exit code, which is that of a signal if it is negative."""
    if code >= 0:
        return f"it ended with code {code}."
    try:
        return f"it was ended by {signal.Signals(-code).name}."
    except ValueError:
        return f"it was ended by signal {-code}."


def _groups(controller: str, membership: Path, mount: Path) -> Iterator[Path]:
    """This process's control groups and those above them.

    Both versions are read, of a hierarchy mounted under ``mount``. A container may see its own
    group at the root, under whatever path.
    """
    with suppress(OSError, ValueError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                roots = {mount}
            elif controller in controllers.split(","):
                roots = {mount / controllers, mount / controller}
            else:
                continue
            inside = PurePosixPath(path.lstrip("/"))
            for root in roots:
                for group in (inside, *inside.parents):
                    yield root / group


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


def _rooms(group: Path) -> Iterator[int]:
    """Bytes that one control group leaves, by version 2 and by version 1, if it says so."""
    for limit, used, files in (
        ("memory.max", "memory.current", "inactive_file "),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
    ):
        with suppress(OSError, ValueError):
            room = _number(group / limit) - _number(group / used)  # "max" is no number
            lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
            dropped = (int(line[len(files) :]) for line in lines if line.startswith(files))
            yield room + sum(dropped)


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))
