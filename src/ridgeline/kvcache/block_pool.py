"""The blocks of one KV group: held by sequences, cached for reuse, or free."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

NO_BLOCK = -1  # a table entry whose block was given up because no window reaches it any more


class BlockPool:
    """Reference-counted block ids ``[0, num_blocks)``.

    `grow`, `twin` and `share` take references, `release` gives them back. A block that nobody holds
    is free, unless it is cached: then it keeps its contents until it is the least recently released
    one when a block is needed, and ``on_evict`` is told. The pool never touches KV itself.

    Of several ranks each has as many blocks as the others, in the order of their numbers. Then
    every table has ``run_blocks`` of one rank, then as many of the next, and so on, from the rank
    on that had the most to give.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        on_evict: Callable[[int], None] = lambda _: None,
        num_ranks: int = 1,
        run_blocks: int = 1,
    ) -> None:
        assert num_blocks % num_ranks == 0, "ranks share blocks equally"
        self.num_blocks = num_blocks
        self.num_ranks, self._run_blocks = num_ranks, run_blocks
        self._of_each = of_each = num_blocks // num_ranks
        self._on_evict = on_evict
        self._free = [
            list(range((rank + 1) * of_each - 1, rank * of_each - 1, -1))
            for rank in range(num_ranks)
        ]
        self._references = [0] * num_blocks
        self._cached: set[int] = set()
        # Of each rank those that are cached and not held, and since when.
        self._idle: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(num_ranks)]
        self.now_s = 0.0  # whoever owns the pool sets it

    @property
    def num_free(self) -> int:
        """Blocks that can be had, by eviction if need be."""
        return sum(map(len, self._free)) + self.num_idle

    @property
    def num_free_anywhere(self) -> int:
        """Blocks that can be had of every rank."""
        return min(map(self._num_free_of, range(self.num_ranks)))

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_idle(self) -> int:
        """Cached blocks that nobody holds."""
        return sum(map(len, self._idle))

    def allocate(self, count: int) -> list[int]:
        """A new table of ``count`` blocks; the caller has checked that they are free."""
        table: list[int] = []
        self.grow(table, count)
        return table

    def grow(self, table: list[int], count: int) -> None:
        """Add ``count`` blocks to the end of a table; the caller has checked that they are free."""
        assert count >= 0, "a table grows"
        for rank in self._ranks_of_next(table, count):
            table.append(self._take(rank))

    def twin(self, block: int) -> int:
        """Take a block that may stand in the place of another one; the caller has checked."""
        return self._take(self._rank_of(block))

    def has_room(
        self,
        table: Sequence[int],
        count: int,
        twins: Sequence[int] = (),
        freed: Iterable[Sequence[int]] = (),
    ) -> bool:
        """Whether a table can `grow` by ``count``, and each of ``twins`` be copied, if those who
        hold the tables ``freed`` released them."""
        if count <= 0 and not twins:
            return True
        if self.num_ranks == 1:
            missing = max(0, count) + len(twins) - self._num_free_of(0)
            return missing <= 0 or missing <= self.num_freed(freed)
        copies = map(self._rank_of, twins)
        found = Counter(map(self._rank_of, self._freed(freed)))
        needed = Counter([*self._ranks_of_next(table, count, found), *copies])
        return all(n <= self._num_free_of(rank) + found[rank] for rank, n in needed.items())

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of these blocks, which are held or cached already."""
        for block in blocks:
            if block == NO_BLOCK:
                continue
            idle = self._idle[self._rank_of(block)]
            assert self._references[block] > 0 or block in idle, "the block is free"
            self._references[block] += 1
            idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each; the last block given goes first when room is needed."""
        for block in reversed(blocks):
            if block == NO_BLOCK:
                continue
            assert self._references[block] > 0, "a block is released twice"
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if block in self._cached:
                self._idle[self._rank_of(block)][block] = self.now_s
            else:
                self._free[self._rank_of(block)].append(block)

    def cache(self, block: int) -> None:
        """Keep the contents of a held block when its last holder is gone."""
        assert self._references[block] > 0, "only a held block becomes cached"
        self._cached.add(block)

    def uncache(self, block: int) -> None:
        """Keep the contents of a cached block no longer than somebody holds it."""
        self._cached.remove(block)
        rank = self._rank_of(block)
        if self._idle[rank].pop(block, None) is not None:
            self._free[rank].append(block)

    def evict_idle(self, *, before_s: float) -> None:
        """Free the cached blocks that nobody has held since before then."""
        for rank, idle in enumerate(self._idle):
            while idle and next(iter(idle.values())) < before_s:
                self._free[rank].append(self._evict(rank))

    def is_shared(self, block: int) -> bool:
        """Whether writing to the block would be seen by another holder."""
        return block != NO_BLOCK and self._references[block] > 1

    def num_freed(self, holders: Iterable[Sequence[int]]) -> int:
        """How many blocks nobody would hold if these holders released all of theirs."""
        return len(self._freed(holders))

    def num_in_turn(self, blocks: Sequence[int]) -> int:
        """How many blocks from the start a table may have: one sequence's may not follow another's
        that began at another rank."""
        if self.num_ranks == 1 or not blocks:
            return len(blocks)
        first = self._rank_of(blocks[0])
        for entry, block in enumerate(blocks):
            if self._rank_of(block) != self._rank_at(first, entry):
                return entry
        return len(blocks)

    def most_of_a_rank(self, blocks: Iterable[int]) -> int:
        """Of these blocks, as many as the rank has that has the most of them."""
        return max(Counter(map(self._rank_of, blocks)).values(), default=0)

    def check_integrity(self, held: Counter[int]) -> None:
        """Assert that free, idle and held blocks (block → number of holders) are all there is."""
        free = [block for blocks in self._free for block in blocks]
        sets = (set(free), {block for idle in self._idle for block in idle}, set(held))
        assert len(sets[0]) == len(free), "a block is free twice"
        assert sum(map(len, sets)) == self.num_blocks == len(set.union(*sets)), "blocks are lost"
        assert not self._cached & sets[0], "a cached block is free"
        assert sets[1] <= self._cached, "an idle block is not cached"
        for rank, idle in enumerate(self._idle):
            of_rank = {*self._free[rank], *idle}
            assert all(self._rank_of(block) == rank for block in of_rank), "a block is another's"
        for block, references in enumerate(self._references):
            assert references == held[block], "a reference count is wrong"

    def _rank_of(self, block: int) -> int:
        return block // self._of_each if self.num_ranks > 1 else 0

    def _num_free_of(self, rank: int) -> int:
        return len(self._free[rank]) + len(self._idle[rank])

    def _ranks_of_next(
        self, table: Sequence[int], count: int, freed: Counter[int] | None = None
    ) -> Iterable[int]:
        """Of the next blocks of a table; ``freed`` are those that ranks would have beside."""
        if self.num_ranks == 1:
            return (0 for _ in range(count))
        more = freed or Counter()
        first = (
            self._rank_of(table[0])
            if table
            else max(range(self.num_ranks), key=lambda r: self._num_free_of(r) + more[r])
        )
        stop = len(table) + count
        return (self._rank_at(first, entry) for entry in range(len(table), stop))

    def _rank_at(self, first: int, entry: int) -> int:
        """Of a table's entry, by the rank of its first one."""
        return (first + entry // self._run_blocks) % self.num_ranks

    def _freed(self, holders: Iterable[Sequence[int]]) -> list[int]:
        counts = Counter(block for blocks in holders for block in blocks if block != NO_BLOCK)
        return [block for block, count in counts.items() if self._references[block] == count]

    def _take(self, rank: int) -> int:
        assert self._free[rank] or self._idle[rank], "allocation beyond the pool"
        block = self._free[rank].pop() if self._free[rank] else self._evict(rank)
        self._references[block] = 1
        return block

    def _evict(self, rank: int) -> int:
        block, _ = self._idle[rank].popitem(last=False)
        self._cached.remove(block)
        self._on_evict(block)
        return block
