"""Whether traffic, or how far predictions of steps are off, is still what it was."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from statistics import fmean, stdev

_REFERENCE = 16  # observations that say what is usual
_SLACK, _LIMIT = 0.5, 14.0  # of the usual deviation: by chance once in millions of observations
_LEAST_DEVIATION = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A quantity is another than it was: its means (geometric ones of what is on a logarithmic
    scale) before and since, and when it was seen, in seconds since the epoch."""

    quantity: str
    before: float
    since: float
    at_s: float


class MeanShift:
    """A two-sided CUSUM (Page 1954) of means of ``batch`` values, against those of the first ones.

    ``least`` is the smallest change of the mean that counts. After an alarm what is usual is learnt
    anew.
    """

    def __init__(self, least: float, *, batch: int) -> None:
        self._least, self._batch = least, batch
        self._values: list[float] = []
        self._reference: list[float] = []
        self._sums, self._counts = [0.0, 0.0], [0, 0]

    def add(self, value: float) -> tuple[float, float] | None:
        """One more value; where it is the last that shows a shift, the means before and since."""
        self._values.append(value)
        if len(self._values) < self._batch:
            return None
        mean = fmean(self._values)
        self._values.clear()
        if len(self._reference) < _REFERENCE:
            self._reference.append(mean)
            return None
        return self._observe(mean)

    def _observe(self, mean: float) -> tuple[float, float] | None:
        before = fmean(self._reference)
        deviation = max(stdev(self._reference), _LEAST_DEVIATION)
        for side, sign in enumerate((1.0, -1.0)):
            distance = sign * (mean - before) / deviation
            self._sums[side] = max(0.0, self._sums[side] + distance - _SLACK)
            self._counts[side] = self._counts[side] + 1 if self._sums[side] else 0
            if self._sums[side] > _LIMIT:
                shift = (self._sums[side] / self._counts[side] + _SLACK) * deviation
                if shift >= self._least:
                    self._reference.clear()
                    self._sums, self._counts = [0.0, 0.0], [0, 0]
                    return before, before + sign * shift
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """How a quantity is watched: ``least`` is the factor that counts of a ratio, which is watched
    by its logarithm, else the difference; ``batch`` values are one observation."""

    least: float
    is_ratio: bool = True
    batch: int = 32


class DriftWatch:
    """`MeanShift` of several quantities."""

    def __init__(self, watched: Mapping[str, Watched]) -> None:
        self._watched = watched
        self._shifts = {
            name: MeanShift(log(each.least) if each.is_ratio else each.least, batch=each.batch)
            for name, each in watched.items()
        }

    def add(self, quantity: str, value: float, *, at_s: float) -> Alarm | None:
        """One more value of a quantity; ratios are greater than 0."""
        is_ratio = self._watched[quantity].is_ratio
        found = self._shifts[quantity].add(log(value) if is_ratio else value)
        if found is None:
            return None
        before, since = map(exp, found) if is_ratio else found
        return Alarm(quantity=quantity, before=before, since=since, at_s=at_s)
