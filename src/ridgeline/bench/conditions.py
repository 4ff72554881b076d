"""Under what conditions a measurement was taken, and whether something disturbed it."""

import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import psutil

from ridgeline.core.host import cpu_name, usable_cores

# Share of the machine's processor time that other processes may take from a measurement.
CONTENTION_SHARE = 0.05
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")

Conditions = Mapping[str, str | float | int | bool | None]


class Watch:
    """Notes, from its creation to `conditions`, who used the processors."""

    def __init__(self) -> None:
        self._wall = time.monotonic()
        self._busy, self._own = _busy_s(), _own_s()

    def others_share(self) -> float:
        """Share of the machine's processor time that went to other processes (or to the host)."""
        wall = time.monotonic() - self._wall
        others = (_busy_s() - self._busy) - (_own_s() - self._own)
        return min(1.0, max(0.0, others / (wall * (psutil.cpu_count() or 1)))) if wall else 0.0

    def conditions(self, *, threads: int) -> Conditions:
        """Date, processor, governor, threads, load, and whether others contended."""
        share = self.others_share()
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "threads": threads,
            "governor": _GOVERNOR.read_text().strip() if _GOVERNOR.exists() else None,
            "load_1m": round(psutil.getloadavg()[0], 2),
            "others_share": round(share, 3),
            "contended": share > CONTENTION_SHARE,
        }


def _busy_s() -> float:
    """Seconds that all processors were busy since the system started; stolen ones count."""
    times = psutil.cpu_times()
    names = ("user", "system", "nice", "irq", "softirq", "steal")
    return float(sum(getattr(times, name, 0.0) for name in names))


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
