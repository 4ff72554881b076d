"""The KV cache of one model: what its sequences, the pinned prefixes and the tiers hold of it."""

from collections import Counter
from collections.abc import Iterable, Sequence

from ridgeline.core.config import MIN_STATES, blocks_per_sequence
from ridgeline.core.context_ranks import context_blocks
from ridgeline.core.errors import InvalidRequestError, OutOfMemoryError, OverloadedError
from ridgeline.core.kv_compression import KVSelection, KVWindow
from ridgeline.core.kv_reuse import ReusedRange
from ridgeline.kvcache.block_pool import NO_BLOCK, BlockPool
from ridgeline.kvcache.prefix_cache import PrefixCache
from ridgeline.kvcache.reports import KVUsage
from ridgeline.kvcache.sequence_documents import SequenceDocuments
from ridgeline.kvcache.sequence_kv import SequenceKV
from ridgeline.kvcache.tiers import Transfers

_RETRY_AFTER_S = 1.0


class KVCacheManager:
    """Makes the `SequenceKV` of sequences, and keeps pinned prefixes in the pools.

    Prefixes are pinned as far as the rest of the pool still has room for a sequence of
    ``max_length`` tokens.
    """

    def __init__(
        self, cache: PrefixCache, transfers: Transfers | None = None, *, max_length: int
    ) -> None:
        self._cache = cache
        self._transfers = transfers
        self._max_length = max_length
        self._pins: dict[int, list[list[int]]] = {}  # blocks of each group, by number
        self._tenants: dict[int, str] = {}  # of the pins
        self._num_pins = 0

    @property
    def block_tokens(self) -> int:
        return self._cache.block_tokens

    def new_sequence(
        self,
        root_key: bytes | None,
        *,
        tenant: str = "",
        max_length: int,
        seen: KVWindow | None = None,
        selection: KVSelection | None = None,
        token_ids: Sequence[int] = (),
        reused: Sequence[ReusedRange] = (),
    ) -> SequenceKV:
        """What a sequence holds that has no blocks yet; see `SequenceKV`.

        ``reused`` is what its prompt, ``token_ids``, takes of documents.
        """
        documents = None
        if reused:
            assert root_key is not None, "documents are in the prefix cache"
            documents = SequenceDocuments(self._cache, root_key, token_ids, reused)
            root_key = documents.root_key
        return SequenceKV(
            self._cache,
            self._transfers,
            root_key,
            tenant=tenant,
            max_length=max_length,
            seen=seen,
            selection=selection,
            documents=documents,
        )

    def has_free(self, count: int) -> bool:
        """Whether every KV group has so many blocks to give, on whichever rank they have to be."""
        return all(count <= pool.num_free_anywhere for pool in self._kv_pools)

    def pin(self, root_key: bytes, token_ids: Sequence[int], tenant: str = "") -> tuple[int, int]:
        """Keep the whole blocks of a cached prefix until `unpin`; returns a number for that, and
        their tokens.

        Raises:
            OverloadedError: some of it is not cached (any more).
            OutOfMemoryError: what is left of the pool would not hold a sequence of full length.
        """
        number, tables = self._num_pins, self._cache.pin(root_key, token_ids)
        self._pins[number], self._tenants[number] = tables, tenant
        num_whole = len(token_ids) // self.block_tokens
        if self._cache.has_states:
            num_whole = len(tables[0])  # as far as there is a checkpoint
        try:
            self._check_pins()
            if len(tables[0]) < num_whole:
                raise OverloadedError(
                    "The prefix was evicted before it could be pinned; try again.",
                    retry_after_s=_RETRY_AFTER_S,
                )
        except (OutOfMemoryError, OverloadedError):
            self.unpin(number)
            raise
        self._num_pins += 1
        return number, num_whole * self.block_tokens

    def unpin(self, number: int) -> None:
        """Let go of a pinned prefix, which stays cached as others do; once for each number.

        Raises:
            InvalidRequestError: no prefix of that number is pinned.
        """
        if number not in self._pins:
            raise InvalidRequestError(f"No prefix of the number {number} is pinned.")
        del self._tenants[number]
        for pool, table in zip(self._cache.pools, self._pins.pop(number), strict=True):
            pool.release(table)

    def delete_tenant(self, tenant: str) -> None:
        """Forget what was cached and pinned for a tenant; who holds some of it may go on to."""
        for number in [number for number, owner in self._tenants.items() if owner == tenant]:
            self.unpin(number)
        self._cache.delete_tenant(tenant)

    def usage(self, running: Iterable[SequenceKV]) -> tuple[KVUsage, ...]:
        """What the blocks of each KV group are used for, by the sequences that run.

        Only the end of a sequence's table has room to spare: the blocks before it are full.
        """
        size, sequences = self.block_tokens, tuple(running)
        usages = []
        for group, pool in enumerate(self._kv_pools):
            num_held = pool.num_blocks - pool.num_free
            usages.append(
                KVUsage(
                    num_held=num_held,
                    num_idle=pool.num_idle,
                    num_free=pool.num_free - pool.num_idle,
                    num_tokens=num_held * size - sum(kv.num_spare(group) for kv in sequences),
                    num_slots=num_held * size,
                )
            )
        return tuple(usages)

    def check_integrity(self, sequences: Iterable[SequenceKV]) -> None:
        """Assert that blocks of sequences, pins and transfers, and free ones, are all there is."""
        sequences = tuple(sequences)
        for group, pool in enumerate(self._cache.pools):
            holders = [kv.held(group) for kv in sequences]
            holders += [tables[group] for tables in self._pins.values()]
            held = Counter(block for blocks in holders for block in blocks)
            del held[NO_BLOCK]
            if self._transfers is not None:
                held += self._transfers.held(group)
            pool.check_integrity(held)
        self._cache.check_integrity()

    @property
    def _kv_pools(self) -> tuple[BlockPool, ...]:
        return self._cache.pools[: len(self._cache.windows)]

    def _blocks_needed(self, group: int) -> int:
        """Those with which a sequence of full length runs."""
        if group == len(self._cache.windows):
            return MIN_STATES
        window = self._cache.windows[group]
        columns = blocks_per_sequence(self._max_length, window, block_tokens=self.block_tokens)
        num_ranks = self._cache.pools[group].num_ranks
        return context_blocks(columns, num_ranks, self.block_tokens)

    def _check_pins(self) -> None:
        """Raise `OutOfMemoryError` unless a sequence of full length fits beside the pins."""
        for group, pool in enumerate(self._cache.pools):
            pinned = {block for tables in self._pins.values() for block in tables[group]}
            pinned.discard(NO_BLOCK)
            needed = self._blocks_needed(group)
            if pool.num_ranks * pool.most_of_a_rank(pinned) + needed > pool.num_blocks:
                raise OutOfMemoryError(
                    f"The pinned prefixes would take {len(pinned)} of the {pool.num_blocks} KV "
                    f"blocks, and a sequence of {self._max_length} tokens needs {needed}."
                )
