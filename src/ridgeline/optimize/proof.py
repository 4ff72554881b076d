"""Whether one is better than another: paired turns, Student's interval, and the default twice."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt
from statistics import mean, stdev

# Two-sided 95 % quantiles of Student's distribution by degrees of freedom, from 1 on.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
FEWEST_TURNS, MOST_TURNS = 3, len(_STUDENT) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio and its 95 % interval; ``num_turns`` pairs were measured."""

    value: float
    low: float
    high: float
    num_turns: int

    @property
    def is_better(self) -> bool:
        """Whether the whole interval is above 1."""
        return self.low > 1.0


def paired_ratio(log_ratios: Sequence[float]) -> Ratio:
    """Of the logarithms of at least two pairs."""
    count = len(log_ratios)
    center = mean(log_ratios)
    half = _STUDENT[count - 2] * stdev(log_ratios) / sqrt(count)
    return Ratio(
        value=exp(center), low=exp(center - half), high=exp(center + half), num_turns=count
    )
