"""Block tables of sequences over the pools of all KV groups."""

from collections import Counter
from collections.abc import Iterable

from ridgeline.core.plan import BlockCopy, BlockTableUpdate
from ridgeline.kvcache import BlockPool
from ridgeline.scheduler.sequence import Sequence


class BlockTables:
    """Gives sequences the blocks that they write to, with copy-on-write, and takes them back."""

    def __init__(self, num_blocks: tuple[int, ...], block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._pools = tuple(BlockPool(count) for count in num_blocks)

    @property
    def num_groups(self) -> int:
        return len(self._pools)

    @property
    def num_free(self) -> tuple[int, ...]:
        return tuple(pool.num_free for pool in self._pools)

    def can_write(self, sequence: Sequence, start: int, stop: int) -> bool:
        """Whether every group has the blocks for KV positions ``[start, stop)``."""
        return all(
            self._num_missing(sequence, group, start, stop) <= pool.num_free
            for group, pool in enumerate(self._pools)
        )

    def prepare_write(
        self, sequence: Sequence, start: int, stop: int
    ) -> tuple[tuple[BlockTableUpdate, ...], list[BlockCopy]]:
        """Extend the tables to ``stop``; blocks to be written that others hold too are replaced.

        Returns what the executor must be told: table entries that it does not know yet, and copies.
        """
        updates: list[BlockTableUpdate] = []
        copies: list[BlockCopy] = []
        for group, pool in enumerate(self._pools):
            table, first_known = sequence.tables[group], sequence.num_sent[group]
            for entry in self._shared_entries(table, pool, start):
                (fresh,) = pool.allocate(1)
                copies.append(BlockCopy(group=group, source=table[entry], target=fresh))
                pool.release([table[entry]])
                table[entry] = fresh
                first_known = min(first_known, entry)
            table.extend(pool.allocate(self._num_columns(stop) - len(table)))
            if first_known < len(table):
                blocks = tuple(table[first_known:])
                updates.append(BlockTableUpdate(group=group, first=first_known, blocks=blocks))
            sequence.num_sent[group] = len(table)
        return tuple(updates), copies

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let ``child`` hold the parent's blocks of its first ``num_tokens`` tokens."""
        columns = self._num_columns(num_tokens)
        for group, pool in enumerate(self._pools):
            child.tables[group] = parent.tables[group][:columns]
            pool.share(child.tables[group])

    def release(self, sequence: Sequence) -> None:
        for group, pool in enumerate(self._pools):
            pool.release(sequence.tables[group])
            sequence.tables[group] = []
            sequence.num_sent[group] = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that the blocks of these sequences and the free ones are all there is."""
        tables = [sequence.tables for sequence in sequences]
        for group, pool in enumerate(self._pools):
            pool.check_integrity(Counter(block for table in tables for block in table[group]))

    def _num_columns(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def _shared_entries(self, table: list[int], pool: BlockPool, start: int) -> list[int]:
        return [
            entry
            for entry in range(start // self.block_tokens, len(table))
            if pool.is_shared(table[entry])
        ]

    def _num_missing(self, sequence: Sequence, group: int, start: int, stop: int) -> int:
        table, pool = sequence.tables[group], self._pools[group]
        fresh = max(0, self._num_columns(stop) - len(table))
        return fresh + len(self._shared_entries(table, pool, start))
