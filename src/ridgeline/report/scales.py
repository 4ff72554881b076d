"""From values to places on a drawing, and the round values between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Protocol

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LOG_STEPS = (1, 2, 5)


class Scale(Protocol):
    """One axis."""

    def place(self, value: float) -> float:
        """Where a value is drawn, in units of the drawing."""

    def ticks(self) -> Sequence[float]:
        """Round values, the lowest first."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Equal distances for equal differences, from ``low`` at ``begin`` to ``high`` at ``end``."""

    low: float
    high: float
    begin: float
    end: float
    most_ticks: int = 5

    def place(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return self.begin + (self.end - self.begin) * (value - self.low) / span

    def ticks(self) -> Sequence[float]:
        rough = ((self.high - self.low) or 1.0) / self.most_ticks
        power = 10 ** floor(log10(rough))
        step = next(each * power for each in _STEPS if each * power >= rough * 0.999)
        first, last = ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Logarithmic:
    """Equal distances for equal ratios; values are above 0."""

    low: float
    high: float
    begin: float
    end: float
    most_ticks: int = 6

    def place(self, value: float) -> float:
        span = log10(self.high / self.low) or 1.0
        return self.begin + (self.end - self.begin) * log10(value / self.low) / span

    def ticks(self) -> Sequence[float]:
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for steps in (_LOG_STEPS, (1, 3), (1,)):
            found = [step * 10.0**power for power in powers for step in steps]
            inside = [each for each in found if self.low <= each * 1.0001 and each <= self.high]
            if len(inside) <= self.most_ticks:
                return inside
        return inside[:: ceil(len(inside) / self.most_ticks)]


def around(
    values: Sequence[float], *, margin: float = 0.06, zero: bool = False
) -> tuple[float, float]:
    """The least and the greatest value with room beside them, and 0 where it is asked for."""
    low, high = min(values), max(values)
    room = margin * ((high - low) or abs(high) or 1.0)
    if zero and low >= 0:
        return 0.0, high + room
    return low - room, high + room


def around_logs(values: Sequence[float], *, factor: float = 1.3) -> tuple[float, float]:
    """The same for a logarithmic axis."""
    return min(values) / factor, max(values) * factor


def short(value: float) -> str:
    """A value as it stands at an axis: 12k, 3.5, 0.02.

    >>> short(12000), short(3.5), short(0.02), short(0)
    ('12k', '3.5', '0.02', '0')
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
