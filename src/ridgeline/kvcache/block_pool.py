"""The blocks of one KV group: held by sequences, cached for reuse, or free."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

NO_BLOCK = -1  # a table entry whose block was given up because no window reaches it any more


class BlockPool:
    """Reference-counted block ids ``[0, num_blocks)``.

    `allocate` and `share` take references, `release` gives them back. A block that nobody holds is
    free, unless it is cached: then it keeps its contents until it is the least recently released
    one when a block is needed, and ``on_evict`` is told. The pool never touches KV itself.
    """

    def __init__(
        self, num_blocks: int, *, on_evict: Callable[[int], None] = lambda _: None
    ) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._cached: set[int] = set()
        self._idle: OrderedDict[int, float] = OrderedDict()  # cached, not held; since when
        self.now_s = 0.0  # whoever owns the pool sets it

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, by eviction if need be."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_idle(self) -> int:
        """Cached blocks that nobody holds."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks; the caller has checked `num_free`."""
        assert 0 <= count <= self.num_free, "allocation beyond the pool"
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of these blocks, which are held or cached already."""
        for block in blocks:
            if block == NO_BLOCK:
                continue
            assert self._references[block] > 0 or block in self._idle, "the block is free"
            self._references[block] += 1
            self._idle.pop(block, None)

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
                self._idle[block] = self.now_s
            else:
                self._free.append(block)

    def cache(self, block: int) -> None:
        """Keep the contents of a held block when its last holder is gone."""
        assert self._references[block] > 0, "only a held block becomes cached"
        self._cached.add(block)

    def uncache(self, block: int) -> None:
        """Keep the contents of a cached block no longer than somebody holds it."""
        self._cached.remove(block)
        if self._idle.pop(block, None) is not None:
            self._free.append(block)

    def evict_idle(self, *, before_s: float) -> None:
        """Free the cached blocks that nobody has held since before then."""
        while self._idle and next(iter(self._idle.values())) < before_s:
            self._free.append(self._evict())

    def is_shared(self, block: int) -> bool:
        """Whether writing to the block would be seen by another holder."""
        return block != NO_BLOCK and self._references[block] > 1

    def num_freed(self, holders: Iterable[Sequence[int]]) -> int:
        """How many blocks nobody would hold if these holders released all of theirs."""
        counts = Counter(block for blocks in holders for block in blocks if block != NO_BLOCK)
        return sum(self._references[block] == count for block, count in counts.items())

    def check_integrity(self, held: Counter[int]) -> None:
        """Assert that free, idle and held blocks (block → number of holders) are all there is."""
        sets = (set(self._free), set(self._idle), set(held))
        assert len(sets[0]) == len(self._free), "a block is free twice"
        assert sum(map(len, sets)) == self.num_blocks == len(set.union(*sets)), "blocks are lost"
        assert not self._cached & sets[0], "a cached block is free"
        assert sets[1] <= self._cached, "an idle block is not cached"
        for block, references in enumerate(self._references):
            assert references == held[block], "a reference count is wrong"

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._cached.remove(block)
        self._on_evict(block)
        return block
