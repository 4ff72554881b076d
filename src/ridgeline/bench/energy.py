"""Energy by the counters of the machine: RAPL of CPUs and `nvidia-smi` for GPUs, or nothing.

Never a datasheet's watts times seconds: where no counter can be read, energy is unknown.
"""

import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

_RAPL = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Joules of a stretch of time; ``valid`` only if every sample could be read."""

    joules: float | None
    source: str | None
    valid: bool

    def per_token(self, num_tokens: float) -> float | None:
        """Joules for each token, ``None`` where unknown."""
        return self.joules / num_tokens if self.valid and self.joules and num_tokens else None


UNKNOWN = Energy(joules=None, source=None, valid=False)


def add_energies(parts: Sequence[Energy]) -> Energy:
    """Of several stretches; unknown if one of them is."""
    if not parts or any(part.joules is None for part in parts):
        return UNKNOWN
    return Energy(
        joules=sum(part.joules or 0.0 for part in parts),
        source=parts[0].source,
        valid=all(part.valid for part in parts),
    )


@dataclass
class EnergyMeter:
    """Reads counters at `start` and `stop`; `sample` in between (every second) for GPUs and for
    counters that wrap. GPUs are asked by a program that takes some 50 ms, or not at all."""

    root: Path = field(default_factory=lambda: _RAPL)
    gpus: bool = True
    _zones: list[Path] = field(default_factory=list)
    _last: list[int] = field(default_factory=list)
    _joules: float = 0.0
    _power: list[tuple[float, float]] = field(default_factory=list)
    _busy: list[float] = field(default_factory=list)
    _failed: bool = False

    @property
    def gpu_busy_share(self) -> float | None:
        """The mean of what `nvidia-smi` calls utilization: the share of the time in which any
        kernel ran at all, however little it did. ``None`` without GPUs."""
        return sum(self._busy) / len(self._busy) if self._busy else None

    def start(self) -> None:
        """Begin; packages that may be read are found now."""
        self._joules, self._power, self._busy, self._failed = 0.0, [], [], False
        self._zones = [zone for zone in sorted(self.root.glob("intel-rapl:?")) if _readable(zone)]
        self._last = [_energy_uj(zone) for zone in self._zones]
        self._read_gpu()

    def sample(self) -> None:
        """Take a sample."""
        try:
            for index, zone in enumerate(self._zones):
                now = _energy_uj(zone)
                spent = now - self._last[index]
                if spent < 0:
                    spent += int((zone / "max_energy_range_uj").read_text())
                self._last[index] = now
                self._joules += spent / 1e6
        except (OSError, ValueError):
            self._failed = True
        self._read_gpu()

    def stop(self) -> Energy:
        """End, and say what was spent."""
        self.sample()
        sources = ["rapl"] * bool(self._zones) + ["nvml"] * (len(self._power) > 1)
        if not sources:
            return UNKNOWN
        joules = self._joules + trapezoid(self._power)
        return Energy(joules=joules, source="+".join(sources), valid=not self._failed)

    def _read_gpu(self) -> None:
        found = _read_gpus() if self.gpus else None
        if found is not None:
            self._power.append((time.monotonic(), found[0]))
            self._busy.append(found[1])
        elif self._power:
            self._failed = True


def trapezoid(samples: Sequence[tuple[float, float]]) -> float:
    """Joules from (seconds, watts).

    >>> trapezoid([(0.0, 100.0), (2.0, 300.0), (3.0, 300.0)])
    700.0
    """
    return sum(
        (later - earlier) * (power + next_power) / 2
        for (earlier, power), (later, next_power) in pairwise(samples)
    )


def _readable(zone: Path) -> bool:
    try:
        _energy_uj(zone)
    except (OSError, ValueError):
        return False
    return True


def _energy_uj(zone: Path) -> int:
    return int((zone / "energy_uj").read_text())


def _read_gpus() -> tuple[float, float] | None:
    """Watts of all NVIDIA devices and the mean of their busy shares, by the driver's own tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = "--query-gpu=power.draw,utilization.gpu"
    command = [tool, query, "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        rows = [line.split(",") for line in output.stdout.splitlines()]
        watts = sum(float(power) for power, _ in rows)
        return watts, sum(float(percent) for _, percent in rows) / len(rows) / 100
    except (OSError, subprocess.SubprocessError, ValueError, ZeroDivisionError):
        return None
