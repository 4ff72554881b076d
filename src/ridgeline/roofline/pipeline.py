"""Stages of a pipeline: where a model is cut, and how long they wait for each other."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate


def stage_borders(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Cut layers, by what each costs, so that the dearest stage is as cheap as it can be: stage s
    has the layers ``[borders[s], borders[s + 1])``, one at least.

    >>> stage_borders([1, 1, 1, 1, 4], 2)
    (0, 4, 5)
    """
    before = [0.0, *accumulate(costs)]

    @cache
    def best(stop: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """The dearest of so many stages of the layers before ``stop``, and their borders."""
        if stages == 1:
            return before[stop], (0, stop)
        return min(
            (max(dearest, before[stop] - before[first]), (*borders, stop))
            for first in range(stages - 1, stop)
            for dearest, borders in (best(first, stages - 1),)
        )

    assert 1 <= num_stages <= len(costs)
    return best(len(costs), num_stages)[1]


def idle_share(stage_costs: Sequence[float], num_steps: int) -> float:
    """The share of their time that stages wait, with ``num_steps`` steps at once in all of them.

    A stage that is done with a step takes up the next one when that has come as far, so that steps
    end one after the other as fast as the dearest stage lets them, or as there are steps.

    >>> idle_share([1, 1], 1), idle_share([1, 1], 2), idle_share([3, 1], 2)
    (0.5, 0.0, 0.33333333333333337)
    """
    whole = sum(stage_costs)
    period = max(*stage_costs, whole / num_steps)
    return 1 - whole / (len(stage_costs) * period)
