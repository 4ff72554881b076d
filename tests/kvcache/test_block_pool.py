"""Random operations against a model of the pool that is obviously right."""

import random
from collections import Counter

import pytest

from ridgeline.kvcache import BlockPool

NUM_BLOCKS = 50


class Model:
    """Who holds what as one list per holder, and what is cached, oldest first, with its time."""

    def __init__(self):
        self.holders: list[list[int]] = []
        self.cached: set[int] = set()
        self.idle: list[tuple[int, float]] = []
        self.evicted: list[int] = []

    def held(self) -> Counter[int]:
        return Counter(block for blocks in self.holders for block in blocks)

    def free(self) -> int:
        return NUM_BLOCKS - len(self.held())

    def allocated(self, blocks):
        """Blocks that were empty go first; then the idle ones, oldest first."""
        num_empty = self.free() - len(self.idle)
        held = self.held()
        assert all(block not in held for block in blocks)
        evicted = [block for block, _ in self.idle[: max(0, len(blocks) - num_empty)]]
        assert set(evicted) <= set(blocks)
        assert not set(blocks) & {block for block, _ in self.idle[len(evicted) :]}
        self.forget(evicted)
        self.holders.append(blocks)

    def forget(self, blocks):
        self.evicted += blocks
        self.cached -= set(blocks)
        self.idle = [item for item in self.idle if item[0] not in blocks]

    def released(self, index, now_s):
        blocks = self.holders.pop(index)
        held = self.held()
        for block in reversed(blocks):
            if block in self.cached and block not in held:
                self.idle.append((block, now_s))


@pytest.mark.parametrize("seed", range(20))
def test_ten_thousand_random_operations(seed, counted):
    rng, model = random.Random(seed), Model()
    evicted: list[int] = []
    pool = BlockPool(NUM_BLOCKS, on_evict=evicted.append)
    actions = ["allocate", "share", "release", "release", "cache", "uncache", "expire", "revive"]
    for now_s in range(10_000):
        pool.now_s = now_s
        match rng.choice(actions):
            case "allocate":
                blocks = pool.allocate(rng.randint(0, min(5, pool.num_free)))
                model.allocated(blocks)
            case "share" if model.holders:
                blocks = list(rng.choice(model.holders))
                pool.share(blocks)
                model.holders.append(blocks)
            case "release" if model.holders:
                index = rng.randrange(len(model.holders))
                pool.release(model.holders[index])
                model.released(index, now_s)
            case "cache" if held := sorted(model.held()):
                block = rng.choice(held)
                pool.cache(block)
                model.cached.add(block)
            case "uncache" if model.cached:
                block = rng.choice(sorted(model.cached))
                pool.uncache(block)
                model.cached.discard(block)
                model.idle = [item for item in model.idle if item[0] != block]
            case "revive" if model.idle:  # a prefix hit
                block, _ = rng.choice(model.idle)
                pool.share([block])
                model.holders.append([block])
                model.idle = [item for item in model.idle if item[0] != block]
            case "expire" if rng.random() < 0.1:
                before_s = now_s - rng.randint(0, 200)
                pool.evict_idle(before_s=before_s)
                model.forget([block for block, since_s in model.idle if since_s < before_s])
        held = model.held()
        if now_s % 10 == 0:
            pool.check_integrity(held)
        assert evicted == model.evicted
        assert pool.num_free == model.free()
        assert (pool.num_cached, pool.num_idle) == (len(model.cached), len(model.idle))
        assert all(pool.is_shared(block) is (count > 1) for block, count in held.items())
    for blocks in model.holders:
        pool.release(blocks)
    assert pool.num_free == NUM_BLOCKS
    counted(10_000)


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
