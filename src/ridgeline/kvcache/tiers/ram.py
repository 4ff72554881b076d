"""KV entries in the host's memory."""

import time
from collections import OrderedDict
from collections.abc import Callable

from ridgeline.kvcache.tiers.entry import Entry
from ridgeline.kvcache.tiers.tier import LocalTier, TierUsage


class RamTier(LocalTier):
    """See `Tier`. Entries that were not used for ``ttl_s`` seconds are forgotten."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        ttl_s: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._ttl_s = ttl_s
        self._clock = clock or time.monotonic  # it never jumps
        self._entries: OrderedDict[bytes, tuple[Entry, float]] = OrderedDict()  # oldest first
        self._num_bytes = self._num_evicted = 0
        self.entry_bytes = 0  # of the last

    def may_have(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> Entry | None:
        return self._entries[key][0] if self.touch(key) else None

    def peek(self, key: bytes) -> Entry | None:
        """As `get`, from any thread; it counts as no use."""
        found = self._entries.get(key)
        return None if found is None else found[0]

    def touch(self, key: bytes) -> bool:
        self.expire()
        found = self._entries.get(key)
        if found is None:
            return False
        self._entries[key] = (found[0], self._clock())
        self._entries.move_to_end(key)
        return True

    def put(self, entry: Entry) -> None:
        if entry.num_bytes > self._capacity_bytes:
            return
        self._remove(entry.header.key)
        while self._num_bytes + entry.num_bytes > self._capacity_bytes:
            self._remove(next(iter(self._entries)))
            self._num_evicted += 1
        self._entries[entry.header.key] = (entry, self._clock())
        self._num_bytes += entry.num_bytes
        self.entry_bytes = entry.num_bytes

    def delete_tenant(self, tenant: str) -> bool:
        keys = [key for key, (entry, _) in self._entries.items() if entry.header.tenant == tenant]
        for key in keys:
            self._remove(key)
        return True

    def usage(self) -> TierUsage:
        return TierUsage(
            name="ram",
            num_entries=len(self._entries),
            num_bytes=self._num_bytes,
            capacity_bytes=self._capacity_bytes,
            num_evicted=self._num_evicted,
            num_failures=0,
        )

    def close(self) -> None:
        self._entries.clear()
        self._num_bytes = 0

    def expire(self) -> None:
        while self._ttl_s is not None and self._entries:
            key, (_, used_s) = next(iter(self._entries.items()))
            if used_s + self._ttl_s > self._clock():
                return
            self._remove(key)
            self._num_evicted += 1

    def _remove(self, key: bytes) -> None:
        found = self._entries.pop(key, None)
        if found is not None:
            self._num_bytes -= found[0].num_bytes
