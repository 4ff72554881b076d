"""What becomes of several models, for Prometheus."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ridgeline.server.metric_families import PREFIX
from ridgeline.server.pool.pool import ModelPool


class PoolCollector(Collector):
    """Which models are loaded, what that took, and who waits."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        models = self._pool.models
        for name, text, values in (
            ("model_loaded", "1 while it is in memory.", [m.state == "loaded" for m in models]),
            ("model_memory_bytes", "Taken, or expected.", [m.tenancy.num_bytes for m in models]),
            ("model_load_seconds", "Of loading it.", [m.tenancy.load_s for m in models]),
            ("model_requests_waiting", "Until loaded.", [len(m.waiters) for m in models]),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            for model, value in zip(models, values, strict=True):
                gauge.add_metric([model.name], float(value))
            yield gauge
        loads = CounterMetricFamily(PREFIX + "model_loads", "Times.", labels=["model_name"])
        for model in models:
            loads.add_metric([model.name], float(model.num_loads))
        yield loads
        budget = GaugeMetricFamily(PREFIX + "model_budget_bytes", "Of all models together.")
        budget.add_metric([], float(self._pool.config.budget_bytes))
        yield budget
