"""The blocks that one sequence holds of one model: its block tables, and what they are for."""

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from ridgeline.core.config import blocks_per_sequence
from ridgeline.core.kv_compression import KVSelection, KVWindow
from ridgeline.core.plan import BlockCopy, BlockTableUpdate, StateSave
from ridgeline.core.rounding import ceil_div
from ridgeline.kvcache.block_pool import NO_BLOCK, BlockPool
from ridgeline.kvcache.prefix_cache import Match, Node, PrefixCache
from ridgeline.kvcache.sequence_documents import SequenceDocuments
from ridgeline.kvcache.sequence_states import SequenceStates
from ridgeline.kvcache.tiers import Load, Look, Transfers

_NEVER = sys.maxsize


class Write(NamedTuple):
    """What the executor must be told before it writes: table entries that it does not know yet,
    copies, and which states to save."""

    block_updates: tuple[BlockTableUpdate, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    state_saves: tuple[StateSave, ...] = ()


_NOTHING = Write()


class SequenceKV:
    """A block table for each KV group of a model, with prefix reuse and copy-on-write; and the
    sequence's states (`SequenceStates`), if the model has some.

    Full blocks go into the prefix cache as they are computed, unless ``root_key`` is ``None``, as
    it is where ``seen`` says what a token sees in groups without a window, or a ``selection`` what
    stays of the prompt.
    Tables, prefix nodes and counts change by the methods here and by nothing else. At most
    ``max_length`` tokens are written.

    Attributes:
        num_computed: tokens from the start whose KV is in the blocks.
        num_writable: positions that can be written without a change of the tables.
        state_lag: the last of the computed tokens, which were drafts, and which the state takes in
            with the next segment.
        seen: what every token sees, in groups without a window.
        selection: what stays of the prompt, in those.
        documents: what the prompt takes of documents; then ``root_key`` is theirs.
        num_cached: tokens found in the prefix cache at the first admission, ``None`` before that.
    """

    __slots__ = (
        "_cache",
        "_collided",
        "_max_length",
        "_nodes",
        "_note_at",
        "_num_given_up",
        "_num_sent",
        "_num_sinks",
        "_pools",
        "_root_key",
        "_states",
        "_tables",
        "_tenant",
        "_transfers",
        "_windows",
        "documents",
        "num_cached",
        "num_computed",
        "num_writable",
        "seen",
        "selection",
        "state_lag",
    )

    def __init__(
        self,
        cache: PrefixCache,
        transfers: Transfers | None,
        root_key: bytes | None,
        *,
        tenant: str,
        max_length: int,
        seen: KVWindow | None = None,
        selection: KVSelection | None = None,
        documents: SequenceDocuments | None = None,
    ) -> None:
        is_whole = seen is None and selection is None
        assert is_whole or root_key is None, "what is not seen is of no prefix"
        self._cache = cache
        self._pools = cache.pools[: len(cache.windows)]
        self._states = (
            SequenceStates(cache, is_cached=root_key is not None) if cache.has_states else None
        )
        self._transfers = transfers
        self._root_key = root_key
        self._tenant = tenant
        self._max_length = max_length
        self._tables: list[list[int]] = [[] for _ in self._pools]
        self._num_sent = [0] * len(self._pools)  # table entries that the executor was told of
        self.seen, self.selection, self.documents = seen, selection, documents
        self._windows = cache.windows
        sinks = 0 if selection is None else self._num_columns(selection.num_chosen)
        if seen is not None:
            self._windows = tuple(window or seen.window for window in cache.windows)
            sinks = self._num_columns(seen.sinks)
        # Entries that stay before the window, and those that no window reaches any more, or will
        # not before the others.
        self._num_sinks = [0 if window else sinks for window in cache.windows]
        self._num_given_up = list(self._num_sinks)
        self._nodes: list[Node] = []  # of the prefix cache, one for each full block,
        self._collided = False  # until another sequence's node had the same key
        self._note_at = 0  # computed tokens before which nothing can be cached or given up
        self.num_computed = 0
        self.num_writable = 0
        self.state_lag = 0
        self.num_cached: int | None = None

    @property
    def tables(self) -> Sequence[Sequence[int]]:
        """The blocks of each group, `NO_BLOCK` for those that were given up; not to be changed."""
        return self._tables

    @property
    def holds_blocks(self) -> bool:
        if self.documents is not None and self.documents.holds_blocks:
            return True
        return any(self._tables) or (self._states is not None and bool(self._states.held))

    @property
    def takes_drafts(self) -> bool:
        """Whether what was computed for rejected tokens can be given up, and no block that they
        would see is."""
        return self.seen is None and self.selection is None

    @property
    def has_windows(self) -> bool:
        """Whether blocks are given up."""
        return any(window is not None for window in self._windows)

    def held(self, group: int) -> Sequence[int]:
        """The blocks of a group that are held, states' included; `NO_BLOCK` among them."""
        if group < len(self._tables):
            own = self._tables[group]
            return own if self.documents is None else [*own, *self.documents.held(group)]
        return () if self._states is None else self._states.held

    def reuse_prefix(self, token_ids: Sequence[int]) -> None:
        """Start from the longest cached prefix of these tokens, if no blocks are held."""
        if self._root_key is None or self.holds_blocks:
            return
        self._nodes, tables, num_nodes = self._cache.match(self._root_key, token_ids)
        self._tables = tables[: len(self._pools)]
        for group, table in enumerate(self._tables):
            self._pools[group].share(table)
            self._num_given_up[group] = table.count(NO_BLOCK)
        size = self._cache.block_tokens
        self.num_computed = len(self._nodes) * size
        if self.documents is not None:
            self.documents.hold(self.num_computed)
        if self._states is not None:
            checkpoint = tables[-1][-1] if self._nodes else None
            marks = (num_nodes * size, (len(token_ids) - 1) // size * size)
            self._states.start_from(checkpoint, self.num_computed, marks)

    def look_for_rest(self, token_ids: Sequence[int]) -> Look | None:
        """Have tiers that are unsure find out what they have after the prefix that is reused.

        Meanwhile the sequence holds nothing; ``None`` where all is known.
        """
        if self._transfers is None or self._root_key is None:
            return None
        look = self._transfers.look(self._root_key, Match(self._nodes, self._tables), token_ids)
        if look is not None:
            self.release()
        return look

    def load_rest(
        self, token_ids: Sequence[int], compute_s: Callable[[int, int], float]
    ) -> Load | None:
        """Start to load what tiers have after the prefix that is reused.

        ``compute_s(num_tokens, context)`` says what it takes to compute them instead: no more is
        loaded than in that time. The load holds the prefix, and the sequence nothing.
        """
        num_nodes, size = len(self._nodes), self._cache.block_tokens
        if self._transfers is None or self._root_key is None:
            return None
        if self.num_computed != num_nodes * size:
            return None
        match = Match(list(self._nodes), [list(table) for table in self._tables])
        count, load_s = self._transfers.find(self._root_key, match, token_ids)
        limit_s = compute_s(count * size, num_nodes * size)
        if not count or load_s >= limit_s:
            return None
        load = self._transfers.load(self._root_key, match, token_ids, limit_s=limit_s)
        if load is not None:
            self.release()
        return load

    def count_hit(self, num_tokens: int) -> None:
        """Note what was found in the cache of so many tokens, at the first admission."""
        if self.num_cached is not None:
            return
        self.num_cached = len(self._nodes) * self._cache.block_tokens
        if self.documents is not None:
            self.num_cached += self.documents.num_found(self.num_computed)
        if self._root_key is not None:
            self._cache.stats.queried_tokens += num_tokens
            self._cache.stats.hit_tokens += self.num_cached
        if self._transfers is not None:
            self._transfers.touch(self._nodes)

    def can_hold(self, length: int, *, without: Iterable["SequenceKV"] = ()) -> bool:
        """Whether the blocks for ``length`` tokens are free, or held already.

        With a window these are the window's and some for tokens in flight (`blocks_per_sequence`).
        Blocks that only sequences of ``without`` hold count as free.
        """
        others = tuple(without)
        if self._states is not None and not self._states.can_write():
            states = len(self._pools)
            if not self._cache.pools[states].num_freed(each.held(states) for each in others):
                return False
        for group, pool in enumerate(self._pools):
            table = self._tables[group]
            held = sum(entry != NO_BLOCK for entry in table)
            fresh = self._most_blocks(group, length) - held
            twins = self._shared_blocks(table, pool, self.num_computed)
            if not pool.has_room(table, fresh, twins, (each.held(group) for each in others)):
                return False
        return True

    def advance(
        self, num_computed: int, token_ids: Sequence[int], *, num_accepted: int = 0
    ) -> None:
        """The KV of the first ``num_computed`` of these tokens is there; the last ``num_accepted``
        were drafts.

        Blocks that are full now are cached, and those that no window reaches are given up.
        """
        self.num_computed = num_computed
        self.state_lag = 0 if self._states is None else num_accepted
        if num_computed >= self._note_at:
            self._cache_full_blocks(token_ids)
            self._give_up_unseen_blocks()
            if self.documents is not None:
                self.documents.advance(num_computed)
            if self._states is not None:
                self._states.advance(num_computed, self._nodes)
            self._note_at = self._next_note()

    def can_write(self, start: int, stop: int) -> bool:
        """Whether every group has the blocks for KV positions ``[start, stop)``."""
        if self._states is not None and not self._states.can_write():
            return False
        return stop <= self.num_writable or all(
            pool.has_room(
                table,
                max(0, self._num_columns(stop) - len(table)),
                self._shared_blocks(table, pool, start),
            )
            for table, pool in zip(self._tables, self._pools, strict=True)
        )

    def clip_to_windows(
        self, start: int, stop: int, num_known: int, others: Collection["SequenceKV"]
    ) -> int:
        """How far a step from ``start`` may write, at most to ``stop``, of ``num_known`` tokens.

        In groups with a window a sequence has the blocks that were counted for it when it was
        admitted, and beyond them those that are free and that the ``others`` are not to have.
        A result at ``start`` means that it has to wait for the steps in flight to give blocks up.
        """
        for group, pool in enumerate(self._pools):
            if self._windows[group] is None:
                continue
            table = self._tables[group]
            fresh = self._num_columns(stop) - len(table)
            counted = self._num_counted(group, num_known)
            if fresh > counted:
                spare = pool.num_free - len(self._shared_entries(table, pool, start))
                spare -= sum(
                    max(0, other._num_counted(group, other._max_length))
                    for other in others
                    if other is not self
                )
                columns = len(table) + max(0, counted, min(fresh, spare))
                stop = max(start, min(stop, columns * self._cache.block_tokens))
        return stop

    def prepare_write(
        self, start: int, stop: int, *, reserve: int = 0, num_drafts: int = 0
    ) -> Write:
        """Extend the tables to ``stop``; blocks to be written that others hold too are replaced.

        The last ``num_drafts`` positions are of drafts. Groups without a window are extended to
        ``reserve`` tokens, if blocks are free.
        """
        if stop <= self.num_writable:
            return _NOTHING
        updates: list[BlockTableUpdate] = []
        copies: list[BlockCopy] = []
        for group, pool in enumerate(self._pools):
            table, first_known = self._tables[group], self._num_sent[group]
            for entry in self._shared_entries(table, pool, start):
                fresh = pool.twin(table[entry])
                copies.append(BlockCopy(group=group, source=table[entry], target=fresh))
                pool.release([table[entry]])
                table[entry] = fresh
                first_known = min(first_known, entry)
            pool.grow(table, max(0, self._num_columns(stop) - len(table)))
            spare = self._num_columns(reserve) - len(table)
            if spare > 0 and self._windows[group] is None and pool.has_room(table, spare):
                pool.grow(table, spare)
            if first_known < len(table):
                blocks = tuple(table[first_known:])
                updates.append(BlockTableUpdate(group=group, first=first_known, blocks=blocks))
            self._num_sent[group] = len(table)
        columns = min(map(len, self._tables), default=_NEVER)  # encoders have no KV
        self.num_writable = columns * self._cache.block_tokens
        if self._states is None:
            return Write(tuple(updates), tuple(copies))
        start, stop = start - self.lag_at(start), stop - num_drafts
        state_updates, state_copies, saves = self._states.prepare_write(start, stop)
        self.num_writable = min(self.num_writable, self._states.next_save(stop - 1))
        self._note_at = min(self._note_at, self._states.next_note)
        return Write((*updates, *state_updates), (*copies, *state_copies), tuple(saves))

    def lag_at(self, start: int) -> int:
        """How many tokens before ``start`` a segment from there has the state take in."""
        return self.state_lag if start == self.num_computed else 0

    def send_again(self) -> None:
        """Let the next segment bring the whole tables: what a void one brought was not taken."""
        self._num_sent = [0] * len(self._pools)
        self.num_writable = 0
        if self._states is not None:
            self._states.start_again()

    def trim(self, num_tokens: int) -> None:
        """Give back the blocks beyond so many tokens, to which rejected drafts were written."""
        columns = self._num_columns(num_tokens)
        for group, pool in enumerate(self._pools):
            table = self._tables[group]
            pool.release(table[columns:])
            del table[columns:]
            self._num_sent[group] = min(self._num_sent[group], columns)
        self.num_writable = min(self.num_writable, columns * self._cache.block_tokens)

    def fork(self, parent: "SequenceKV", num_tokens: int) -> None:
        """Hold those of the parent's blocks of its first ``num_tokens`` tokens that the next sees.

        They count as computed. With states nothing is held: the parent's is further on, and the
        prefix cache has the checkpoint.
        """
        if self._states is not None:
            return
        columns = self._num_columns(num_tokens)
        for group, pool in enumerate(self._pools):
            sinks, table = self._num_sinks[group], parent._tables[group]
            first = max(min(self._first_visible_block(group, num_tokens), columns), sinks)
            unseen = [NO_BLOCK] * (first - sinks)
            self._tables[group] = (table[:sinks] + unseen + table[first:])[:columns]
            self._num_given_up[group] = first
            pool.share(self._tables[group])
        self._nodes = parent._nodes[: num_tokens // self._cache.block_tokens]
        self.num_computed = num_tokens
        parent.num_writable = 0  # its last block is shared now

    def release(self) -> None:
        """Give everything back; nothing is computed any more."""
        for group, pool in enumerate(self._pools):
            pool.release(self._tables[group])
            self._tables[group] = []
            self._num_sent[group] = 0
            self._num_given_up[group] = self._num_sinks[group]
        if self._states is not None:
            self._states.release()
        if self.documents is not None:
            self.documents.release()
        self._nodes = []
        self.num_computed = self.num_writable = self._note_at = self.state_lag = 0

    def num_spare(self, group: int) -> int:
        """Tokens for which a group's table has room beyond the computed ones."""
        return len(self._tables[group]) * self._cache.block_tokens - self.num_computed

    def _cache_full_blocks(self, token_ids: Sequence[int]) -> None:
        if self._root_key is None or self._collided:
            return
        size = self._cache.block_tokens
        while (len(self._nodes) + 1) * size <= self.num_computed:
            entry = len(self._nodes)
            node = self._cache.insert(
                self._root_key,
                self._nodes[-1] if self._nodes else None,
                token_ids[entry * size : (entry + 1) * size],
                [table[entry] for table in self._tables],
                tenant=self._tenant,
            )
            if node is None:
                self._collided = True
                return
            self._nodes.append(node)
            if self._transfers is not None:
                self._transfers.save(node)

    def _give_up_unseen_blocks(self) -> None:
        for group, table in enumerate(self._tables):
            last = self._first_visible_block(group, self.num_computed)
            first = self._num_given_up[group]
            self._pools[group].release(table[first:last][::-1])  # the oldest are evicted first
            table[first:last] = [NO_BLOCK] * len(table[first:last])
            self._num_given_up[group] = max(first, last)

    def _next_note(self) -> int:
        """The number of computed tokens at which there is something to cache or give up again."""
        at, size = _NEVER, self._cache.block_tokens
        if self._root_key is not None and not self._collided:
            at = (len(self._nodes) + 1) * size
        for group, window in enumerate(self._windows):
            if window is not None:
                at = min(at, (self._num_given_up[group] + 1) * size + window - 1)
        if self.selection is not None and self.num_computed < self.selection.stop:
            at = min(at, self.selection.stop)
        if self.documents is not None and (taken := self.documents.next_note()) is not None:
            at = min(at, taken)
        return at if self._states is None else min(at, self._states.next_note)

    def _most_blocks(self, group: int, length: int) -> int:
        """Those of a group that are counted for a sequence of ``length`` tokens."""
        behind_sinks = length - self._num_sinks[group] * self._cache.block_tokens
        return self._num_sinks[group] + blocks_per_sequence(
            max(0, behind_sinks), self._windows[group], block_tokens=self._cache.block_tokens
        )

    def _num_counted(self, group: int, length: int) -> int:
        """Of the blocks that are counted for so many tokens, those that are lacking."""
        given_up = self._num_given_up[group] - self._num_sinks[group]
        held = len(self._tables[group]) - given_up
        return self._most_blocks(group, length) - held

    def _first_visible_block(self, group: int, num_computed: int) -> int:
        """The first table entry behind sinks that the token at position ``num_computed`` sees."""
        window, selection = self._windows[group], self.selection
        if window is None:
            is_chosen = selection is not None and num_computed >= selection.stop
            return selection.start // self._cache.block_tokens if selection and is_chosen else 0
        return max(0, num_computed - window + 1) // self._cache.block_tokens

    def _num_columns(self, num_tokens: int) -> int:
        return ceil_div(num_tokens, self._cache.block_tokens)

    def _shared_entries(self, table: list[int], pool: BlockPool, start: int) -> list[int]:
        return [
            entry
            for entry in range(start // self._cache.block_tokens, len(table))
            if pool.is_shared(table[entry])
        ]

    def _shared_blocks(self, table: list[int], pool: BlockPool, start: int) -> list[int]:
        return [table[entry] for entry in self._shared_entries(table, pool, start)]
