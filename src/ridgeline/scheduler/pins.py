"""Prefixes that stay in the pool whatever happens."""

from collections.abc import Iterator, Sequence

from ridgeline.core.errors import InvalidRequestError, OutOfMemoryError, OverloadedError
from ridgeline.kvcache import PrefixCache
from ridgeline.scheduler.blocks import BlockTables
from ridgeline.scheduler.config import SchedulerConfig

_RETRY_AFTER_S = 1.0


class PinnedPrefixes:
    """Holds their blocks, as far as the rest of the pool still has room for a long sequence."""

    def __init__(self, config: SchedulerConfig, cache: PrefixCache, blocks: BlockTables) -> None:
        self._config = config
        self._cache = cache
        self._blocks = blocks
        self._tables: dict[int, list[list[int]]] = {}  # blocks of each group, by number
        self._tenants: dict[int, str] = {}
        self._num_pins = 0

    def __iter__(self) -> Iterator[list[list[int]]]:
        """The blocks of each group, pin by pin."""
        return iter(self._tables.values())

    def pin(self, cache_key: bytes, token_ids: Sequence[int], tenant: str = "") -> tuple[int, int]:
        """See `Scheduler.pin_prefix`."""
        number, tables = self._num_pins, self._cache.pin(cache_key, token_ids)
        self._tables[number], self._tenants[number] = tables, tenant
        num_whole = len(token_ids) // self._config.block_tokens
        try:
            self._blocks.check_pins(self._tables.values(), max_length=self._config.max_model_len)
            if len(tables[0]) < num_whole:
                raise OverloadedError(
                    "The prefix was evicted before it could be pinned; try again.",
                    retry_after_s=_RETRY_AFTER_S,
                )
        except (OutOfMemoryError, OverloadedError):
            self.unpin(number)
            raise
        self._num_pins += 1
        return number, num_whole * self._config.block_tokens

    def unpin(self, number: int) -> None:
        """See `Scheduler.unpin`."""
        if number not in self._tables:
            raise InvalidRequestError(f"No prefix of the number {number} is pinned.")
        del self._tenants[number]
        self._blocks.release_tables(self._tables.pop(number))

    def delete_tenant(self, tenant: str) -> None:
        """Let go of all that was pinned for a tenant."""
        for number in [number for number, owner in self._tenants.items() if owner == tenant]:
            self.unpin(number)
