"""What an exchange between ranks takes, by its size."""

import time
from collections.abc import Sequence

import numpy as np

from ridgeline.core.parallel_layout import Link
from ridgeline.kernels.cpu.group import RankGroup

SIZES = (4 * 1024, 1 << 20)  # bytes of a rank's part, of which the two figures are made
_SPENT_S = 0.02  # for each size
_FEWEST, _MOST = 5, 200  # exchanges


def exchange_seconds(group: RankGroup, part_bytes: int) -> float:
    """What an all-gather of parts of that size takes; all ranks measure together.

    Of some it is the one that a quarter are faster than: others that work on the machine delay
    some. The number of repetitions is rank 0's, and reaches the others with what is exchanged.
    """
    own = np.zeros((1, part_bytes // 8))
    borders = [rank * own.shape[1] for rank in range(group.num_ranks + 1)]
    whole = group.gather(own, borders)  # once before: ranks begin at different times
    seconds: list[float] = []
    begin_s = time.perf_counter()
    while True:
        start_s = time.perf_counter()
        is_last = len(seconds) >= _MOST or (
            len(seconds) >= _FEWEST and start_s - begin_s > _SPENT_S
        )
        own[0, 0] = is_last
        group.gather(own, borders, whole)
        if whole[0, 0]:
            return float(np.quantile(seconds, 0.25))
        seconds.append(time.perf_counter() - start_s)


def link_of(seconds: Sequence[float], part_bytes: Sequence[int], num_ranks: int) -> Link:
    """From what the smallest and the largest exchange took."""
    grown = (part_bytes[-1] - part_bytes[0]) * (num_ranks - 1)
    spent = max(seconds[-1] - seconds[0], 1e-9)
    latency_s = seconds[0] - spent * part_bytes[0] * (num_ranks - 1) / grown
    return Link(latency_s=max(latency_s, 1e-9), bytes_per_s=grown / spent)
