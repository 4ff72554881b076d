"""Block tables of sequences over the pools of all KV groups, with prefix reuse."""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from ridgeline.core.config import blocks_per_sequence
from ridgeline.core.errors import OutOfMemoryError
from ridgeline.core.plan import BlockCopy, BlockTableUpdate
from ridgeline.kvcache import NO_BLOCK, BlockPool, KVUsage, Match, PrefixCache
from ridgeline.kvcache.tiers import Load, Transfers
from ridgeline.scheduler.sequence import Sequence

_NEVER = sys.maxsize


class BlockTables:
    """Gives sequences the blocks that they write to, with copy-on-write, and takes them back.

    Full blocks go into the prefix cache as they are computed, unless the request opts out.
    """

    def __init__(self, cache: PrefixCache, transfers: Transfers | None = None) -> None:
        self._transfers = transfers
        self.block_tokens = cache.block_tokens
        self._cache = cache
        self._pools = cache.pools

    @property
    def num_groups(self) -> int:
        return len(self._pools)

    def reuse_prefix(self, sequence: Sequence) -> None:
        """Start a sequence that holds nothing from the longest cached prefix of its tokens."""
        root_key = sequence.request.cache_key
        if root_key is None or any(sequence.tables):
            return
        match = self._cache.match(root_key, sequence.token_ids)
        for group, table in enumerate(match.tables):
            self._pools[group].share(table)
            sequence.tables[group] = table
            sequence.num_given_up[group] = table.count(NO_BLOCK)
        sequence.nodes = list(match.nodes)
        sequence.num_computed = len(match.nodes) * self.block_tokens

    def load_rest(self, sequence: Sequence, is_worth: Callable[[int, int], bool]) -> Load | None:
        """Start to load what tiers have after the prefix that a sequence reuses.

        ``is_worth(num_tokens, context)`` is asked whether to load rather than compute them. If so,
        the load holds the prefix, and the sequence nothing.
        """
        root_key, num_nodes, size = (
            sequence.request.cache_key,
            len(sequence.nodes),
            self.block_tokens,
        )
        if self._transfers is None or root_key is None or sequence.num_computed != num_nodes * size:
            return None
        match = Match(sequence.nodes, sequence.tables)
        count = self._transfers.find(root_key, match, sequence.token_ids)
        if not count or not is_worth(count * size, num_nodes * size):
            return None
        match = Match(list(sequence.nodes), [list(table) for table in sequence.tables])
        load = self._transfers.load(root_key, match, sequence.token_ids)
        if load is not None:
            self.release(sequence)
            sequence.num_computed = 0
        return load

    def count_hit(self, sequence: Sequence) -> None:
        """Note what a sequence found in the cache when it is admitted for the first time."""
        if sequence.num_cached_tokens is not None:
            return
        sequence.num_cached_tokens = len(sequence.nodes) * self.block_tokens
        if sequence.request.cache_key is not None:
            self._cache.stats.queried_tokens += len(sequence.token_ids)
            self._cache.stats.hit_tokens += sequence.num_cached_tokens
        if self._transfers is not None:
            self._transfers.touch(sequence.nodes)

    def can_hold(self, sequence: Sequence, *, without: Collection[Sequence] = ()) -> bool:
        """Whether the blocks for all known tokens are free, or held by the sequence already.

        With a window these are the window's and some for tokens in flight (`blocks_per_sequence`).
        Blocks that only the sequences ``without`` hold count as free.
        """
        length = len(sequence.token_ids)
        for group, pool in enumerate(self._pools):
            table, most = sequence.tables[group], self._most_blocks(group, length)
            held = sum(entry != NO_BLOCK for entry in table)
            shared = len(self._shared_entries(table, pool, sequence.num_computed))
            missing = most - held + shared - pool.num_free
            if missing > 0 and missing > pool.num_freed(each.tables[group] for each in without):
                return False
        return True

    def note_computed(self, sequence: Sequence) -> None:
        """Cache the blocks that the last step filled, and give up those that no window reaches."""
        if sequence.num_computed < sequence.note_at:
            return
        root_key, size = sequence.request.cache_key, self.block_tokens
        if sequence.collided:
            root_key = None
        while root_key is not None and (len(sequence.nodes) + 1) * size <= sequence.num_computed:
            entry = len(sequence.nodes)
            node = self._cache.insert(
                root_key,
                sequence.nodes[-1] if sequence.nodes else None,
                sequence.token_ids[entry * size : (entry + 1) * size],
                [table[entry] for table in sequence.tables],
                tenant=sequence.request.tenant,
            )
            if node is None:
                sequence.collided = True
                break
            sequence.nodes.append(node)
            if self._transfers is not None:
                self._transfers.save(node)
        for group, table in enumerate(sequence.tables):
            last = self._cache.first_visible_block(group, sequence.num_computed)
            first = sequence.num_given_up[group]
            self._pools[group].release(table[first:last][::-1])  # the oldest are evicted first
            table[first:last] = [NO_BLOCK] * len(table[first:last])
            sequence.num_given_up[group] = max(first, last)
        sequence.note_at = self._next_note(sequence)

    def has_free(self, count: int) -> bool:
        """Whether every group has so many blocks to give."""
        return all(count <= pool.num_free for pool in self._pools)

    def can_write(self, sequence: Sequence, start: int, stop: int) -> bool:
        """Whether every group has the blocks for KV positions ``[start, stop)``."""
        return stop <= sequence.num_writable or all(
            self._num_missing(sequence, group, start, stop) <= pool.num_free
            for group, pool in enumerate(self._pools)
        )

    def clip_to_windows(
        self, sequence: Sequence, start: int, stop: int, others: Collection[Sequence] = ()
    ) -> int:
        """How far a step from ``start`` may write, at most to ``stop``.

        In groups with a window a sequence has the blocks that were counted for it when it was
        admitted, and beyond them those that are free and that the ``others`` are not to have.
        A result at ``start`` means that it has to wait for the steps in flight to give blocks up.
        """
        for group, pool in enumerate(self._pools):
            if self._cache.windows[group] is None:
                continue
            table = sequence.tables[group]
            fresh = self._num_columns(stop) - len(table)
            counted = self._num_counted(sequence, group, len(sequence.token_ids))
            if fresh > counted:
                spare = pool.num_free - len(self._shared_entries(table, pool, start))
                spare -= sum(
                    max(0, self._num_counted(other, group, other.max_length))
                    for other in others
                    if other is not sequence
                )
                columns = len(table) + max(0, counted, min(fresh, spare))
                stop = max(start, min(stop, columns * self.block_tokens))
        return stop

    def prepare_write(
        self, sequence: Sequence, start: int, stop: int, *, reserve: int = 0
    ) -> tuple[tuple[BlockTableUpdate, ...], list[BlockCopy]]:
        """Extend the tables to ``stop``; blocks to be written that others hold too are replaced.

        Groups without a window are extended to ``reserve`` tokens, if blocks are free. Returns what
        the executor must be told: table entries that it does not know yet, and copies.
        """
        if stop <= sequence.num_writable:
            return (), []
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
            table.extend(pool.allocate(max(0, self._num_columns(stop) - len(table))))
            spare = self._num_columns(reserve) - len(table)
            if 0 < spare <= pool.num_free and self._cache.windows[group] is None:
                table.extend(pool.allocate(spare))
            if first_known < len(table):
                blocks = tuple(table[first_known:])
                updates.append(BlockTableUpdate(group=group, first=first_known, blocks=blocks))
            sequence.num_sent[group] = len(table)
        sequence.num_writable = min(map(len, sequence.tables)) * self.block_tokens
        return tuple(updates), copies

    def send_again(self, sequence: Sequence) -> None:
        """Let the next segment bring the whole tables: what a void one brought was not taken."""
        sequence.num_sent = [0] * self.num_groups
        sequence.num_writable = 0

    def trim(self, sequence: Sequence) -> None:
        """Give back blocks beyond the known tokens, to which rejected drafts were written."""
        columns = self._num_columns(len(sequence.token_ids))
        for group, pool in enumerate(self._pools):
            table = sequence.tables[group]
            pool.release(table[columns:])
            del table[columns:]
            sequence.num_sent[group] = min(sequence.num_sent[group], columns)
        sequence.num_writable = min(sequence.num_writable, columns * self.block_tokens)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let ``child`` hold those of the parent's blocks of its first ``num_tokens`` tokens that
        the next one sees."""
        columns = self._num_columns(num_tokens)
        for group, pool in enumerate(self._pools):
            first = min(self._cache.first_visible_block(group, num_tokens), columns)
            child.tables[group] = [NO_BLOCK] * first + parent.tables[group][first:columns]
            child.num_given_up[group] = first
            pool.share(child.tables[group])
        child.nodes = parent.nodes[: num_tokens // self.block_tokens]
        parent.num_writable = 0  # its last block is shared now

    def release(self, sequence: Sequence) -> None:
        for group, pool in enumerate(self._pools):
            pool.release(sequence.tables[group])
            sequence.tables[group] = []
            sequence.num_sent[group] = sequence.num_given_up[group] = 0
        sequence.nodes = []
        sequence.num_writable = sequence.note_at = 0

    def release_tables(self, tables: Iterable[list[int]]) -> None:
        """Give back blocks of each group that no sequence holds."""
        for pool, table in zip(self._pools, tables, strict=True):
            pool.release(table)

    def check_pins(self, pins: Collection[list[list[int]]], *, max_length: int) -> None:
        """Raise `OutOfMemoryError` unless a sequence of ``max_length`` fits beside these blocks."""
        for group, pool in enumerate(self._pools):
            pinned = {block for tables in pins for block in tables[group]} - {NO_BLOCK}
            needed = self._most_blocks(group, max_length)
            if len(pinned) + needed > pool.num_blocks:
                raise OutOfMemoryError(
                    f"The pinned prefixes would take {len(pinned)} of the {pool.num_blocks} KV "
                    f"blocks, and a sequence of {max_length} tokens needs {needed}."
                )

    def usage(self, sequences: Iterable[Sequence]) -> tuple[KVUsage, ...]:
        """What the blocks of each group are used for; ``sequences`` are those that run.

        Only the end of a sequence's table has room to spare: the blocks before it are full.
        """
        size, running = self.block_tokens, tuple(sequences)
        usages = []
        for group, pool in enumerate(self._pools):
            num_held = pool.num_blocks - pool.num_free
            spare = sum(len(s.tables[group]) * size - s.num_computed for s in running)
            usages.append(
                KVUsage(
                    num_held=num_held,
                    num_idle=pool.num_idle,
                    num_free=pool.num_free - pool.num_idle,
                    num_tokens=num_held * size - spare,
                    num_slots=num_held * size,
                )
            )
        return tuple(usages)

    def check_integrity(
        self, sequences: Iterable[Sequence], pins: Iterable[list[list[int]]] = ()
    ) -> None:
        """Assert that blocks of sequences, pins and transfers, and free ones, are all there is."""
        tables = [*(sequence.tables for sequence in sequences), *pins]
        for group, pool in enumerate(self._pools):
            held = Counter(block for table in tables for block in table[group])
            del held[NO_BLOCK]
            if self._transfers is not None:
                held += self._transfers.held(group)
            pool.check_integrity(held)
        self._cache.check_integrity()

    def _next_note(self, sequence: Sequence) -> int:
        """The number of computed tokens at which `note_computed` has something to do again."""
        at, size = _NEVER, self.block_tokens
        if sequence.request.cache_key is not None and not sequence.collided:
            at = (len(sequence.nodes) + 1) * size
        for group, window in enumerate(self._cache.windows):
            if window is not None:
                at = min(at, (sequence.num_given_up[group] + 1) * size + window - 1)
        return at

    def _most_blocks(self, group: int, length: int) -> int:
        """Those of a group that are counted for a sequence of ``length`` tokens."""
        return blocks_per_sequence(
            length, self._cache.windows[group], block_tokens=self.block_tokens
        )

    def _num_counted(self, sequence: Sequence, group: int, length: int) -> int:
        """Of the blocks that are counted for so many tokens, those that a sequence lacks."""
        held = len(sequence.tables[group]) - sequence.num_given_up[group]
        return self._most_blocks(group, length) - held

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
