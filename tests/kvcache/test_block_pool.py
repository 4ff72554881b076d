"""Random operations against a model of the pool that is obviously right."""

import random
from collections import Counter

import pytest

from ridgeline.kvcache import BlockPool


@pytest.mark.parametrize("seed", range(20))
def test_random_operations(seed):
    rng = random.Random(seed)
    pool, holders = BlockPool(50), []  # one list of blocks for each holder
    for _ in range(2_000):
        action = rng.choice(["allocate", "share", "release"])
        if action == "allocate":
            count = rng.randint(0, min(5, pool.num_free))
            before = pool.num_free
            holders.append(pool.allocate(count))
            assert pool.num_free == before - count
        elif holders and action == "share":
            blocks = rng.choice(holders)
            pool.share(blocks)
            holders.append(list(blocks))
        elif holders:
            pool.release(holders.pop(rng.randrange(len(holders))))
        held = Counter(block for blocks in holders for block in blocks)
        pool.check_integrity(held)
        for block, count in held.items():
            assert pool.is_shared(block) is (count > 1)
    for blocks in holders:
        pool.release(blocks)
    assert pool.num_free == 50


def test_misuse_is_caught():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.share(blocks)
    with pytest.raises(AssertionError):
        pool.check_integrity(Counter({0: 1}))
