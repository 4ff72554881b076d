"""The processors that this process may run on."""

import math
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_CPUINFO = Path("/proc/cpuinfo")


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
