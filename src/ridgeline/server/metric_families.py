"""The families of metrics, whose labels tell one model from another; and engines' own figures."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ridgeline.core.errors import EngineUnavailableError
from ridgeline.core.expert_load import ExpertLoad
from ridgeline.core.speculation_figures import DraftChoices, SpeculationFigures
from ridgeline.engine.client import EngineClient
from ridgeline.kvcache.tiers import PeerFigures
from ridgeline.roofline.live import RooflineReport
from ridgeline.roofline.utilization import roof_of
from ridgeline.server.traffic import TrafficSketch

PREFIX = "ridgeline:"
_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# What becomes of requests. Mistakes of the caller are neither completed nor failed, and nor is what
# the client gave up; lines of batches, for which nobody waits, are not in it.
REQUESTS = {
    "received": "Requests that came.",
    "completed": "Requests that were answered to the end.",
    "good": "Completed requests that met every limit (--slo).",
    "failed": "Requests that were refused for load, or failed inside.",
}


class OfModel(Protocol):
    """The metrics of one model."""

    engine: EngineClient
    traffic: TrafficSketch

    @property
    def model_name(self) -> str: ...

    def observe_steps(self) -> None: ...


class MetricFamilies:
    """Every metric, without the names of models; ``members`` are those that have them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.tenants = CollectorRegistry(auto_describe=False)  # not for every tenant to see
        self.members: list[OfModel] = []

        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(
                PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry
            )

        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.")
        self.publish = histogram(
            "time_to_publish_seconds",
            "Arrival to the first text that a user sees: after reasoning and calls of tools; the "
            "end of what is not streamed.",
        )
        self.stall = histogram("request_stall_seconds", "The largest gap of an output.")
        self.itl = histogram("inter_token_latency_seconds", "Gaps per token of one output.")
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "Mean of a request, first token left out."
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.")
        self.queue = histogram("request_queue_time_seconds", "Arrival to first step.")
        self.prefill = histogram("request_prefill_time_seconds", "First step to first token.")
        self.decode = histogram("request_decode_time_seconds", "First to last token.")
        self.inference = histogram("request_inference_time_seconds", "First step to last token.")
        self.iteration = histogram("iteration_tokens_total", "Tokens of a step.", _TOKENS)
        self.success = Counter(
            PREFIX + "request_success",
            "Outputs by the reason of their end.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.requests = {
            name: Counter(f"{PREFIX}requests_{name}", text, ["model_name"], registry=self.registry)
            for name, text in REQUESTS.items()
        }
        self.missed = Counter(
            PREFIX + "slo_missed",
            "Completed requests that missed a limit.",
            ["model_name", "slo"],
            registry=self.registry,
        )
        self.limits = Gauge(
            PREFIX + "slo_seconds", "Limits.", ["model_name", "slo"], registry=self.registry
        )
        self.tokens = Counter(
            PREFIX + "tenant_tokens",
            "Tokens of each key: prompt, cached (of those) and output.",
            ["tenant", "kind"],
            registry=self.tenants,
        )
        self.cost = Counter(
            PREFIX + "tenant_cost", "Cost by the price list.", ["tenant"], registry=self.tenants
        )
        self.guard = Counter(
            PREFIX + "guard_decisions",
            "Answers of the scorer by their kind; failed where there was none.",
            ["model_name", "decision"],
            registry=self.registry,
        )
        self.guard_seconds = histogram("guard_decision_seconds", "From asking it to its answer.")
        self.http = Counter(
            PREFIX + "http_requests",
            "Answers by route and status.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self.registry.register(_EngineCollector(self.members))


class _EngineCollector(Collector):
    """The engines' counters, as they are when Prometheus asks."""

    def __init__(self, members: Sequence[OfModel]) -> None:
        self._members = members

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for member in self._members:
            for metric in _EngineMetrics(member).collect():
                if (same := found.setdefault(metric.name, metric)) is not metric:
                    same.samples += metric.samples
        return found.values()


class _EngineMetrics:
    """Those of one engine."""

    def __init__(self, member: OfModel) -> None:
        self._engine, self._traffic = member.engine, member.traffic
        self._model = member.model_name

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for name, text, value in (
            ("num_requests_running", "Sequences that compute.", stats.num_running),
            ("num_requests_waiting", "Sequences that wait.", stats.num_waiting),
            ("kv_cache_usage_perc", "Held share of the KV pool, 0 to 1.", stats.kv_usage),
            ("engine_ready", "1 while requests are taken.", self._engine.health().is_ready),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model], float(value))
            yield gauge
        for name, text, count in (
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits),
            ("num_preemptions", "Sequences put back.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens computed or found.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generated_tokens),
            ("engine_restarts", "Engine processes started again.", stats.num_restarts),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model], float(count))
            yield counter
        with contextlib.suppress(EngineUnavailableError):  # not loaded
            yield self._cache_config()
        yield from self._peers(stats.kv_peers)
        yield from self._speculation(stats.speculation or SpeculationFigures())
        if stats.roofline is not None:
            yield from self._roofline(stats.roofline)
        self._traffic.look(stats.roofline)
        alarms = CounterMetricFamily(
            PREFIX + "drift_alarms",
            "Times that traffic, or how far predictions are off, was found to have changed.",
            labels=["model_name", "quantity"],
        )
        for quantity, number in self._traffic.num_alarms.items():
            alarms.add_metric([self._model, quantity], float(number))
        yield alarms

    def _peers(self, figures: PeerFigures | None) -> Iterable[Metric]:
        """The engines that KV is read of."""
        peers = () if figures is None else figures.peers
        labels = ["model_name", "peer"]
        up = GaugeMetricFamily(PREFIX + "kv_peer_up", "1 while KV is read of it.", labels=labels)
        rate = GaugeMetricFamily(
            PREFIX + "kv_peer_bytes_per_second", "KV that came from it, of late.", labels=labels
        )
        failures = CounterMetricFamily(
            PREFIX + "kv_peer_failures", "Times that it failed, or was too slow.", labels=labels
        )
        for peer in peers:
            up.add_metric([self._model, peer.address], float(not peer.is_absent))
            rate.add_metric([self._model, peer.address], peer.bytes_per_s)
            failures.add_metric([self._model, peer.address], float(peer.num_failures))
        if peers:
            yield from (up, rate, failures)

    def _speculation(self, figures: SpeculationFigures) -> Iterable[Metric]:
        """Drafts, verified and accepted; and what an adaptive drafter chose."""
        choices = figures.choices or DraftChoices()
        labels = ["model_name"]
        for name, text, count in (
            ("spec_decode_num_drafts", "Drafts verified.", figures.num_drafts),
            ("spec_decode_num_draft_tokens", "Tokens of drafts.", figures.num_drafted),
            ("spec_decode_num_accepted_tokens", "Accepted of them.", figures.num_accepted),
            ("speculation_probes", "Tries while drafting does not pay.", choices.num_probes),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            counter.add_metric([self._model], float(count))
            yield counter
        for name, text, label, counts in (
            (
                "spec_decode_num_accepted_tokens_per_pos",
                "Accepted tokens by their position in the draft.",
                "position",
                dict(enumerate(figures.accepted_at)) or {0: 0},
            ),
            (
                "spec_decode_num_accepted_tokens_per_rank",
                "Accepted tokens by their rank among those of a tree in one place.",
                "rank",
                dict(enumerate(figures.accepted_by_rank)) or {0: 0},
            ),
            (
                "speculation_steps",
                "Steps by the length of the longest draft chosen.",
                "length",
                choices.steps_by_length,
            ),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=[*labels, label])
            for key, number in counts.items():
                counter.add_metric([self._model, str(key)], float(number))
            yield counter
        gauge = GaugeMetricFamily(
            PREFIX + "speculation_expected_tokens_per_second",
            "What the latest choice of drafts is expected to give.",
            labels=labels,
        )
        gauge.add_metric([self._model], choices.expected_tok_s)
        yield gauge

    def _roofline(self, report: RooflineReport) -> Iterable[Metric]:
        """What each phase reached of the ceilings since the start; without ceilings only work."""
        labels = ["model_name", "phase"]
        phases = (("prefill", report.prefill), ("decode", report.decode))
        for name, text, field in (
            ("mfu", "Share of the compute ceiling, 0 to 1.", "mfu"),
            ("mbu", "Share of the memory ceiling, 0 to 1.", "mbu"),
            ("prediction_error", "Median of |predicted - measured| / measured.", "median_error"),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            for phase, totals in phases:
                if (value := getattr(totals, field)) is not None:
                    gauge.add_metric([self._model, phase], value)
            yield gauge
        if report.experts is not None:
            yield from self._experts(report.experts)
        roof = roof_of(report) or {}
        for name, text, key in (
            ("ceiling_flops_per_second", "Measured ceiling of products.", "flops"),
            ("ceiling_bytes_per_second", "Measured ceiling of the memory.", "bandwidth"),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            if key in roof:
                gauge.add_metric([self._model], roof[key])
            yield gauge
        for name, text, field in (
            ("step_seconds", "Measured seconds of steps.", "seconds"),
            ("step_predicted_seconds", "What was predicted for them.", "predicted_s"),
            ("step_flops", "Useful floating-point operations.", "useful_flops"),
            ("step_bytes", "Bytes moved.", "moved_bytes"),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            for phase, totals in phases:
                if (value := getattr(totals, field)) is not None:
                    counter.add_metric([self._model, phase], value)
            yield counter

    def _experts(self, load: ExpertLoad) -> Iterable[Metric]:
        """How tokens are spread over experts: as many series however many experts there are."""
        counter = CounterMetricFamily(
            PREFIX + "expert_tokens",
            "Tokens times experts of each, over all layers.",
            labels=["model_name"],
        )
        counter.add_metric([self._model], float(load.routed_tokens))
        yield counter
        gauge = GaugeMetricFamily(
            PREFIX + "expert_skew",
            "Tokens of the most loaded / of the mean: of experts over all layers, of those of the "
            "worst layer, of ranks that share them.",
            labels=["model_name", "of"],
        )
        for of, skew in (
            ("experts", load.skew),
            ("worst_layer", load.worst_skew),
            ("ranks", load.rank_skew),
        ):
            gauge.add_metric([self._model, of], skew)
        yield gauge

    def _cache_config(self) -> Metric:
        config = self._engine.config
        labels = {
            "model_name": self._model,
            "block_size": str(config.block_tokens),
            "num_gpu_blocks": str(sum(config.num_blocks)),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "cache_dtype": config.kv_cache_dtype,
        }
        gauge = GaugeMetricFamily(PREFIX + "cache_config_info", "KV pool.", labels=list(labels))
        gauge.add_metric(list(labels.values()), 1.0)
        return gauge
