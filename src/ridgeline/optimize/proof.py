"""Whether one is better than another: turns of visits, Student's interval, the default twice."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from statistics import mean, stdev
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

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
    center = mean(log_ratios)
    error = stdev(log_ratios) / sqrt(len(log_ratios))
    return _ratio(center, error, len(log_ratios) - 1, len(log_ratios))


def ratios_over(first: K, turns: Sequence[Mapping[K, Sequence[float]]]) -> dict[K, Ratio]:
    """Of each other one over ``first``: the logarithms of all visits of at least two turns, each of
    which has as many of each as any other turn.

    What is left of a visit beside what its turn and what it visits add is noise, which all visits
    share (analysis of variance of two factors without interaction). Pairs would learn of the
    noise from themselves alone.
    """
    count, visits = len(turns), [log for turn in turns for logs in turn.values() for log in logs]
    levels = [mean([log for logs in turn.values() for log in logs]) for turn in turns]
    effects = {
        each: mean(
            log - level for turn, level in zip(turns, levels, strict=True) for log in turn[each]
        )
        for each in turns[0]
    }
    squares = sum(
        (log - level - effects[each]) ** 2
        for turn, level in zip(turns, levels, strict=True)
        for each, logs in turn.items()
        for log in logs
    )
    freedom = len(visits) - count - (len(effects) - 1)
    noise = sqrt(squares / freedom)
    sizes = {each: count * len(logs) for each, logs in turns[0].items()}
    return {
        each: _ratio(
            effects[each] - effects[first],
            noise * sqrt(1 / sizes[each] + 1 / sizes[first]),
            freedom,
            count,
        )
        for each in effects
        if each != first
    }


def _ratio(center: float, error: float, freedom: int, num_turns: int) -> Ratio:
    half = _STUDENT[min(freedom, len(_STUDENT)) - 1] * error
    return Ratio(
        value=exp(center), low=exp(center - half), high=exp(center + half), num_turns=num_turns
    )
