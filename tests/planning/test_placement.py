"""Models on devices: what fits, and what it costs."""

import random

import pytest

from ridgeline.planning import placement
from ridgeline.planning.placement import Bin, Item, place


@pytest.mark.parametrize("seed", range(20))
def test_placements_hold_and_exact_is_never_worse(seed):
    rng = random.Random(seed)
    devices = [Bin(name=str(i), memory_bytes=rng.choice([24, 40, 80])) for i in range(3)]
    items = [
        Item(name=str(i), memory_bytes=rng.uniform(5, 40), time_share=rng.uniform(0, 0.7))
        for i in range(7)
    ]
    found = place(items, devices)
    greedy = placement._first_fit_decreasing(items, devices)
    assert len(found.left_over) <= len(greedy.left_over)
    for held, device in zip(found.bins, devices, strict=True):
        assert sum(item.memory_bytes for item in held) <= device.memory_bytes
        assert sum(item.time_share for item in held) <= 1.0 + 1e-9
    placed = sorted(item.name for held in (*found.bins, found.left_over) for item in held)
    assert placed == sorted(item.name for item in items)
