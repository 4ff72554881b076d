"""Scratch memory of kernels that split a reduction over several programs."""

import torch


class Workspace:
    """Partial results, and counters of the programs that have written theirs.

    The kernels of one stream share one: each is done with it when it ends, and leaves the counters
    at zero. A reduction is split no further than there is room.

    Args:
        num_floats: float32 elements of partial results; 32 MiB serve batches of hundreds.
        num_counters: how many reductions one kernel may split.
    """

    def __init__(
        self,
        device: torch.device | str,
        num_floats: int = 1 << 23,
        num_counters: int = 1 << 16,
    ) -> None:
        self.floats = torch.empty(num_floats, dtype=torch.float32, device=device)
        self.counters = torch.zeros(num_counters, dtype=torch.int32, device=device)

    def most_splits(self, wanted: int, *, reductions: int, floats_each: int) -> int:
        """The largest power of two up to ``wanted`` that there is room for.

        ``floats_each`` is what one part of one of ``reductions`` stores.
        """
        if reductions > len(self.counters):
            return 1
        room = len(self.floats) // max(1, reductions * floats_each)
        limit = min(wanted, room)
        return 1 << (limit.bit_length() - 1) if limit > 1 else 1
