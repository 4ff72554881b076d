"""What one sequence takes of documents whose KV was computed by itself."""

import hashlib
import struct
from collections.abc import Iterable, Sequence

from ridgeline.core.kv_reuse import KVReuse, ReusedRange
from ridgeline.kvcache.prefix_cache import PrefixCache

Tables = list[list[int]]


class SequenceDocuments:
    """The documents of a prompt: held from the prefix cache, in which each is a prefix of its own
    under ``document_key``, until the sequence's steps have taken them over.

    What a sequence computes behind a document is not what it would be after the same tokens as
    plain text. So its own blocks are cached under ``root_key``, which says what is taken.
    """

    def __init__(
        self,
        cache: PrefixCache,
        document_key: bytes,
        token_ids: Sequence[int],
        ranges: Sequence[ReusedRange],
    ) -> None:
        self._cache = cache
        self.document_key = document_key
        flat = [number for each in ranges for number in each]
        packed = struct.pack(f"<{len(flat)}I", *flat)
        self.root_key = hashlib.sha256(document_key + packed).digest()
        self._ranges = tuple(ranges)
        self._tokens = [tuple(token_ids[each.first : each.stop]) for each in ranges]
        self._tables: dict[ReusedRange, Tables] = {}  # of those that are held
        self._lacked: set[ReusedRange] = set()  # at some time
        self._stop = ranges[-1].stop

    @property
    def holds_blocks(self) -> bool:
        return bool(self._tables)

    def held(self, group: int) -> list[int]:
        return [block for tables in self._tables.values() for block in tables[group]]

    def hold(self, num_computed: int) -> None:
        """Hold those that are cached, of what lies behind so many computed tokens."""
        size = self._cache.block_tokens
        for each, tokens in zip(self._ranges, self._tokens, strict=True):
            if each.stop > num_computed and each not in self._tables:
                tables = self._cache.pin(self.document_key, tokens)
                if len(tables[0]) * size == len(tokens):
                    self._tables[each] = tables
                else:
                    self._give_back(tables)
                    self._lacked.add(each)

    def missing(self, num_computed: int) -> list[tuple[int, ...]]:
        """The tokens of those behind so many computed tokens that are not held."""
        pairs = zip(self._ranges, self._tokens, strict=True)
        wanted = [
            tokens
            for each, tokens in pairs
            if each.stop > num_computed and each not in self._tables
        ]
        return list(dict.fromkeys(wanted))

    def num_found(self, num_computed: int) -> int:
        """Tokens behind so many computed ones that were in the cache when they were looked for."""
        found = (each for each in self._ranges if each not in self._lacked)
        return _tokens_behind(found, num_computed)

    def num_taken(self, num_computed: int) -> int:
        """Tokens behind so many computed ones that will not be computed."""
        return _tokens_behind(self._ranges, num_computed)

    def taken(self, position: int) -> tuple[int, tuple[KVReuse, ...]]:
        """The first position from this one on that is computed, and what is taken before it."""
        if position >= self._stop:
            return position, ()
        taken = []
        for each in self._ranges:
            if each.start <= position < each.stop:
                blocks = tuple(map(tuple, self._tables[each]))
                taken.append(KVReuse(each.first, position, each.stop, blocks))
                position = each.stop
        return position, tuple(taken)

    def clip(self, start: int, stop: int) -> int:
        """How far a step may compute that begins at ``start``, at most to ``stop``."""
        return min([stop, *(each.start for each in self._ranges if each.start > start)])

    def next_note(self) -> int | None:
        """The number of computed tokens at which something can be given back."""
        return min((each.stop for each in self._tables), default=None)

    def advance(self, num_computed: int) -> None:
        """Give back what has been taken over."""
        for each in [each for each in self._tables if each.stop <= num_computed]:
            self._give_back(self._tables.pop(each))

    def release(self) -> None:
        while self._tables:
            self._give_back(self._tables.popitem()[1])

    def _give_back(self, tables: Tables) -> None:
        for pool, table in zip(self._cache.pools, tables, strict=True):
            pool.release(table)


def _tokens_behind(ranges: Iterable[ReusedRange], num_computed: int) -> int:
    return sum(max(0, each.stop - max(each.start, num_computed)) for each in ranges)
