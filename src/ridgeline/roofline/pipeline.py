"""Stages of a pipeline: where a model is cut."""

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
