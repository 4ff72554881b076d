"""The blocks of one KV group: free, or held by one or more sequences."""

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference-counted block ids ``[0, num_blocks)``.

    `allocate` and `share` take references, `release` gives them back; a block whose count falls to
    zero is free again. The pool never touches KV itself.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks; the caller has checked `num_free`."""
        assert 0 <= count <= self.num_free, "allocation beyond the pool"
        if count == 0:
            return []
        blocks = self._free[-count:][::-1]
        del self._free[-count:]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of these blocks, which are held already."""
        for block in blocks:
            assert self._references[block] > 0, "a free block cannot be shared"
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each; the last holder frees the block."""
        for block in reversed(blocks):
            assert self._references[block] > 0, "a block is released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def is_shared(self, block: int) -> bool:
        """Whether writing to the block would be seen by another holder."""
        return self._references[block] > 1

    def check_integrity(self, held: Counter[int]) -> None:
        """Assert that ``held`` (block → number of holders) and the free list are all there is."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert len(self._free) + len(held) == self.num_blocks, "blocks are lost"
        for block in self._free:
            assert self._references[block] == 0 and block not in held, "a free block is held"
        for block, holders in held.items():
            assert self._references[block] == holders, "a reference count is wrong"
