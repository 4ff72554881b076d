"""The semantic cache in ``/metrics``."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ridgeline.server.semantic.cache import SemanticCache


class SemanticCacheCollector(Collector):
    """Its counters, and the interval of its wrong answers, as they are when Prometheus asks."""

    def __init__(self, cache: SemanticCache, model_name: str) -> None:
        self._cache = cache
        self._model = model_name

    def collect(self) -> Iterable[Metric]:
        cache, labels = self._cache, ["model_name"]
        for name, text, count in (
            ("hits", "Questions answered by a similar one's answer.", cache.num_hits),
            ("misses", "Questions that were answered anew.", cache.num_misses),
            ("audits", "Hits that were answered anew as well.", cache.num_audits),
            ("wrong", "Audited hits whose answer was wrong.", cache.num_wrong),
        ):
            counter = CounterMetricFamily(f"ridgeline:semantic_cache_{name}", text, labels=labels)
            counter.add_metric([self._model], count)
            yield counter
        low, high = cache.wrong_interval
        for name, text, value in (
            ("on", "1 while it gives answers.", float(cache.is_on)),
            ("entries", "Questions that are kept.", float(cache.num_entries)),
            ("wrong_share_low", "Share of wrong hits, lower end at 95%.", low),
            ("wrong_share_high", "Share of wrong hits, upper end at 95%.", high),
        ):
            gauge = GaugeMetricFamily(f"ridgeline:semantic_cache_{name}", text, labels=labels)
            gauge.add_metric([self._model], value)
            yield gauge
