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


@pytest.mark.skipif(not __debug__, reason="what is asserted is left out under -O")
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


def test_there_is_room_for_what_is_free_and_what_others_would_give_back():
    pool = BlockPool(4)
    table, other = pool.allocate(1), pool.allocate(2)
    assert pool.has_room(table, 1) and not pool.has_room(table, 2)
    assert pool.has_room(table, 0, twins=other[:1]) and not pool.has_room(table, 0, twins=other)
    assert not pool.has_room(table, 1, twins=other[:1])
    assert pool.has_room(table, 3, freed=[other]) and not pool.has_room(table, 4, freed=[other])
    pool.share(other[:1])  # which one holder alone does not free
    assert pool.num_freed([other]) == 1 and pool.num_freed([other, other[:1]]) == 2
    assert not pool.has_room(table, 3, freed=[other])
    pool.allocate(1)
    assert pool.has_room(table, 0) and pool.has_room(table, -1) and not pool.has_room(table, 1)


def test_a_table_has_runs_of_one_rank_after_the_other():
    pool = BlockPool(24, num_ranks=3, run_blocks=2)  # blocks 0 to 7 are the first rank's
    table = pool.allocate(5)
    assert [block // 8 for block in table] == [0, 0, 1, 1, 2]
    pool.grow(table, 3)
    assert [block // 8 for block in table] == [0, 0, 1, 1, 2, 2, 0, 0]
    assert pool.allocate(1)[0] // 8 == 1  # the first that has the most to give
    assert pool.twin(table[4]) // 8 == 2
    assert pool.num_in_turn(table) == 8
    assert pool.num_in_turn([*table[:3], table[4], *table[4:]]) == 3


def test_what_one_rank_lacks_is_not_had_from_another():
    pool = BlockPool(8, num_ranks=2, run_blocks=2)
    table = pool.allocate(2)
    other = pool.allocate(2)
    assert not pool.has_room(table, 5) and pool.has_room(table, 4)
    assert not pool.has_room(table, 4, twins=other)
    assert pool.has_room(table, 4, twins=other[:1], freed=[other])
    assert (pool.num_free, pool.num_free_anywhere) == (4, 2)
    pool.grow(table, 4)
    assert pool.num_free == 0 and not pool.has_room([], 1)
    assert pool.most_of_a_rank(table) == 4
    pool.cache(other[0])
    pool.release(other)
    assert pool.has_room([], 2) and not pool.has_room([], 3)
    pool.grow(found := [], 2)
    assert sorted(found) == sorted(other)


def test_time_begins_at_zero_and_what_was_released_since_stays():
    pool = BlockPool(4, num_ranks=2)
    blocks = pool.allocate(4)
    for now_s, block in enumerate(blocks):
        pool.cache(block)
        if now_s:
            pool.now_s = now_s
        pool.release([block])
    for before_s, num_idle in ((0.0, 4), (0.5, 3), (2.0, 2), (9.0, 0)):
        pool.evict_idle(before_s=before_s)
        assert (pool.num_idle, pool.num_cached, pool.num_free) == (num_idle, num_idle, 4)
