"""Answers that would come out the same again, kept so that they need not."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ridgeline.core.request import CompletionChunk
from ridgeline.server.ids import new_id

_ENTRY_BYTES = 512  # of an entry, beside what it holds


class ReplayedChunk(CompletionChunk, frozen=True, kw_only=True, array_like=True):
    """A whole output that was made before."""


_DECODER = msgspec.msgpack.Decoder(list[ReplayedChunk])


@dataclass(frozen=True, slots=True)
class CacheHit:
    """What an entry has; ``id`` names it to the tenant, who may delete it."""

    id: str
    chunks: Sequence[ReplayedChunk]


@dataclass(frozen=True, slots=True)
class _Entry:
    id: str
    data: bytes
    expires_s: float

    @property
    def num_bytes(self) -> int:
        return len(self.data) + _ENTRY_BYTES


class ResponseCache:
    """The outputs of prompts by what they depend on; each tenant finds its own alone.

    What has not been asked for longest goes first, of the tenant that has the most.
    """

    def __init__(
        self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: dict[str, OrderedDict[bytes, _Entry]] = {}
        self._bytes: dict[str, int] = {}
        self.num_hits = self.num_misses = 0

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    @property
    def num_entries(self) -> int:
        return sum(map(len, self._entries.values()))

    def get(self, tenant: str, key: bytes) -> CacheHit | None:
        """The outputs of a prompt, one chunk each, if they are known."""
        entry = self._entries.get(tenant, OrderedDict()).get(key)
        if entry is not None and entry.expires_s <= self._clock():
            self._drop(tenant, key)
            entry = None
        if entry is None:
            self.num_misses += 1
            return None
        self._entries[tenant].move_to_end(key)
        self.num_hits += 1
        return CacheHit(entry.id, _DECODER.decode(entry.data))

    def put(self, tenant: str, key: bytes, chunks: Sequence[CompletionChunk]) -> None:
        """Keep the outputs of a prompt, a whole chunk each, if they fit."""
        entry = _Entry(new_id("rc_"), msgspec.msgpack.encode(chunks), self._clock() + self._ttl_s)
        if entry.num_bytes > self._max_bytes:
            return
        self._drop(tenant, key)
        self._entries.setdefault(tenant, OrderedDict())[key] = entry
        self._bytes[tenant] = self._bytes.get(tenant, 0) + entry.num_bytes
        while self.num_bytes > self._max_bytes:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self._drop(largest, next(iter(self._entries[largest])))

    def delete(self, tenant: str, entry_id: str) -> bool:
        """Forget one of a tenant's entries; returns whether there was one."""
        for key, entry in self._entries.get(tenant, {}).items():
            if entry.id == entry_id:
                self._drop(tenant, key)
                return True
        return False

    def delete_tenant(self, tenant: str) -> int:
        """Forget all of a tenant's entries; returns how many."""
        self._bytes.pop(tenant, None)
        return len(self._entries.pop(tenant, {}))

    def _drop(self, tenant: str, key: bytes) -> None:
        entries = self._entries.get(tenant, OrderedDict())
        if (entry := entries.pop(key, None)) is None:
            return
        self._bytes[tenant] -= entry.num_bytes
        if not entries:
            del self._entries[tenant], self._bytes[tenant]


class ResponseCacheCollector(Collector):
    """The cache's counters, as they are when Prometheus asks."""

    def __init__(self, cache: ResponseCache, model_name: str) -> None:
        self._cache = cache
        self._model = model_name

    def collect(self) -> Iterable[Metric]:
        cache = self._cache
        for name, text, count in (
            ("response_cache_hits", "Prompts whose outputs were kept.", cache.num_hits),
            ("response_cache_misses", "Prompts whose outputs were not.", cache.num_misses),
        ):
            counter = CounterMetricFamily(f"ridgeline:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], count)
            yield counter
        gauge = GaugeMetricFamily(
            "ridgeline:response_cache_bytes", "Memory of kept outputs.", labels=["model_name"]
        )
        gauge.add_metric([self._model], cache.num_bytes)
        yield gauge


def cache_key(*parts: object) -> bytes:
    """A digest of all that an output depends on."""
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()
