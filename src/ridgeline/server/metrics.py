"""Prometheus metrics under our names, and a second time under those of vLLM."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ridgeline.core.request import CompletionChunk, RequestTimings
from ridgeline.core.speculation_figures import DraftChoices, SpeculationFigures
from ridgeline.engine.client import EngineClient
from ridgeline.engine.stats import StepRecord
from ridgeline.roofline.live import RooflineReport
from ridgeline.roofline.slo import SLO_NAMES, Slo, parse_slo
from ridgeline.roofline.utilization import roof_of
from ridgeline.server.config import ServerConfig
from ridgeline.server.keys import Caller
from ridgeline.server.traffic import TrafficSketch

_KEPT_REQUESTS = 2048
_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS")
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# What dashboards for vLLM query, and what means the same here.
ALIASED = frozenset({
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "cache_config_info",
    "prompt_tokens", "generation_tokens", "request_success", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "iteration_tokens_total",
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
})  # fmt: skip
_PREFIX = "ridgeline:"
# What becomes of requests. Mistakes of the caller are neither completed nor failed, and nor is what
# the client gave up; lines of batches, for which nobody waits, are not in it.
_REQUESTS = {
    "received": "Requests that came.",
    "completed": "Requests that were answered to the end.",
    "good": "Completed requests that met every limit (--slo).",
    "failed": "Requests that were refused for load, or failed inside.",
}


class CallCounts(Protocol):
    """What is measured of a call."""

    caller: Caller
    arrival_s: float
    published_s: float | None
    is_streamed: bool
    is_complete: bool
    is_batch: bool
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """What the live view shows of a request; seconds, as the server saw them.

    ``publish_s`` is to the first text that a user sees, ``stall_s`` the largest gap.
    """

    finished_s: float
    ttft_s: float
    publish_s: float | None
    tpot_s: float | None
    stall_s: float | None


class Metrics:
    """Counts and measures what requests see; the engine's own figures are read when asked for."""

    def __init__(self, engine: EngineClient, config: ServerConfig, model_name: str) -> None:
        self._aliased = config.vllm_metrics
        self.registry = CollectorRegistry(auto_describe=False)
        self._tenants = CollectorRegistry(auto_describe=False)  # not for every tenant to see
        self.recent: deque[FinishedRequest] = deque(maxlen=_KEPT_REQUESTS)
        self.traffic = TrafficSketch()
        self.slo = Slo() if config.slo is None else parse_slo(config.slo)
        self.counts = dict.fromkeys(_REQUESTS, 0)
        self._last_step = 0
        self._engine = engine
        model = (model_name,)

        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            metric = Histogram(
                _PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry
            )
            return metric.labels(*model)

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
            _PREFIX + "request_success",
            "Outputs by the reason of their end.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._requests = {
            name: Counter(
                f"{_PREFIX}requests_{name}", text, ["model_name"], registry=self.registry
            ).labels(*model)
            for name, text in _REQUESTS.items()
        }
        self._missed = Counter(
            _PREFIX + "slo_missed",
            "Completed requests that missed a limit.",
            ["model_name", "slo"],
            registry=self.registry,
        )
        limits = Gauge(
            _PREFIX + "slo_seconds", "Limits.", ["model_name", "slo"], registry=self.registry
        )
        for name, limit in self.slo.limits.items():
            limits.labels(*model, name).set(limit)
        for name in SLO_NAMES:
            self._missed.labels(*model, name)  # 0, and not nothing
        self.tokens = Counter(
            _PREFIX + "tenant_tokens",
            "Tokens of each key: prompt, cached (of those) and output.",
            ["tenant", "kind"],
            registry=self._tenants,
        )
        self.cost = Counter(
            _PREFIX + "tenant_cost", "Cost by the price list.", ["tenant"], registry=self._tenants
        )
        self._guard = Counter(
            _PREFIX + "guard_decisions",
            "Answers of the scorer by their kind; failed where there was none.",
            ["model_name", "decision"],
            registry=self.registry,
        )
        self._guard_seconds = histogram("guard_decision_seconds", "From asking it to its answer.")
        self._http = Counter(
            _PREFIX + "http_requests",
            "Answers by route and status.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self._model = model
        self.registry.register(_EngineCollector(engine, model_name, self.traffic))

    def http(self, route: str, method: str, status: int) -> None:
        """Count an answer; status 0 is a client that went away first."""
        known = method if method in _METHODS else "other"
        self._http.labels(route, known, str(status)).inc()

    def count(self, name: str) -> None:
        """One more request that was received, completed, good or failed."""
        self.counts[name] += 1
        self._requests[name].inc()

    def judge(self, *, ttft_s: float, tpot_s: float | None, end_to_end_s: float) -> None:
        """Count a completed request, as good if it meets every limit."""
        self.count("completed")
        missed = self.slo.missed(ttft_s=ttft_s, tpot_s=tpot_s, end_to_end_s=end_to_end_s)
        for name in missed:
            self._missed.labels(*self._model, name).inc()
        if not missed:
            self.count("good")

    def guard_decided(self, decision: str, seconds: float) -> None:
        """Count an answer of the guard's scorer."""
        self._guard.labels(*self._model, decision).inc()
        self._guard_seconds.observe(seconds)

    def charge(self, tenant: str, cost: float) -> None:
        """Add to what a tenant has cost."""
        self.cost.labels(tenant).inc(cost)

    def meter(self, call: CallCounts) -> "Meter":
        return Meter(self, call)

    def finished(self, reason: str) -> None:
        self.success.labels(*self._model, reason).inc()

    def observe_steps(self) -> None:
        """Count the engine's steps since the last time."""
        for step in new_steps(self._engine.stats().steps, self._last_step):
            self.iteration.observe(step.num_tokens)
            self._last_step = step.step_id

    def exposition(self, *, with_tenants: bool) -> bytes:
        """The text that Prometheus reads; ``with_tenants``: also what each key has used."""
        self.observe_steps()
        text = generate_latest(self.registry)
        tenants = generate_latest(self._tenants) if with_tenants else b""
        return text + tenants + (_aliases(text) if self._aliased else b"")


class Meter:
    """Measures one call while its output passes by."""

    def __init__(self, metrics: Metrics, call: CallCounts) -> None:
        self._metrics = metrics
        self._call = call
        self._last_s: dict[int, float] = {}
        self._first_s: float | None = None
        self._stall_s: float | None = None
        self._tpot_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token, ``None`` before there is one."""
        return None if self._first_s is None else self._first_s - self._call.arrival_s

    def take(self, choice: int, chunk: CompletionChunk) -> None:
        """A chunk is here."""
        now = time.monotonic()
        if chunk.token_ids:
            if self._first_s is None:
                self._first_s = now
                self._metrics.ttft.observe(now - self._call.arrival_s)
            if (last := self._last_s.get(choice)) is not None:
                count = len(chunk.token_ids)
                self._stall_s = max(self._stall_s or 0.0, now - last)
                for _ in range(count):
                    self._metrics.itl.observe((now - last) / count)
            self._last_s[choice] = now
        if chunk.timings is not None:
            self._observe(chunk.timings)

    def _observe(self, timings: RequestTimings) -> None:
        metrics = self._metrics
        end = timings.end_to_end_s
        metrics.e2e.observe(end)
        metrics.queue.observe(timings.queue_s)
        metrics.inference.observe(max(0.0, end - timings.queue_s))
        if timings.ttft_s is not None:
            metrics.prefill.observe(max(0.0, timings.ttft_s - timings.queue_s))
            metrics.decode.observe(max(0.0, end - timings.ttft_s))
        if timings.tpot_s is not None:
            metrics.tpot.observe(timings.tpot_s)
            self._tpot_s = max(self._tpot_s or 0.0, timings.tpot_s)  # of several prompts

    def close(self, cost: float | None) -> None:
        """The call is over, whether it finished or not."""
        call, metrics = self._call, self._metrics
        for kind, count in (
            ("prompt", call.prompt_tokens),
            ("cached", call.cached_tokens),
            ("output", call.output_tokens),
        ):
            metrics.tokens.labels(call.caller.tenant, kind).inc(count)
        if cost is not None:
            metrics.charge(call.caller.tenant, cost)
        if call.is_complete and not call.is_batch:
            self._completed()

    def _completed(self) -> None:
        call, metrics, ttft_s = self._call, self._metrics, self.ttft_s
        if ttft_s is None:
            metrics.count("completed")  # and there was nothing to say
            metrics.count("good")
            return
        metrics.traffic.note(call)
        last_s = max(self._last_s.values())
        publish_s = None
        if call.published_s is not None:
            publish_s = (call.published_s if call.is_streamed else last_s) - call.arrival_s
            metrics.publish.observe(publish_s)
        if self._stall_s is not None:
            metrics.stall.observe(self._stall_s)
        metrics.judge(ttft_s=ttft_s, tpot_s=self._tpot_s, end_to_end_s=last_s - call.arrival_s)
        metrics.recent.append(
            FinishedRequest(
                finished_s=time.monotonic(),
                ttft_s=ttft_s,
                publish_s=publish_s,
                tpot_s=self._tpot_s,
                stall_s=self._stall_s,
            )
        )


class _EngineCollector(Collector):
    """The engine's counters, as they are when Prometheus asks."""

    def __init__(self, engine: EngineClient, model_name: str, traffic: TrafficSketch) -> None:
        self._engine, self._traffic = engine, traffic
        self._model = model_name

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for name, text, value in (
            ("num_requests_running", "Sequences that compute.", stats.num_running),
            ("num_requests_waiting", "Sequences that wait.", stats.num_waiting),
            ("kv_cache_usage_perc", "Held share of the KV pool, 0 to 1.", stats.kv_usage),
            ("engine_ready", "1 while requests are taken.", self._engine.health().is_ready),
        ):
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"])
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
            counter = CounterMetricFamily(_PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model], float(count))
            yield counter
        yield self._cache_config()
        yield from self._speculation(stats.speculation or SpeculationFigures())
        if stats.roofline is not None:
            yield from self._roofline(stats.roofline)
        self._traffic.look(stats.roofline)
        alarms = CounterMetricFamily(
            _PREFIX + "drift_alarms",
            "Times that traffic, or how far predictions are off, was found to have changed.",
            labels=["model_name", "quantity"],
        )
        for quantity, number in self._traffic.num_alarms.items():
            alarms.add_metric([self._model, quantity], float(number))
        yield alarms

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
            counter = CounterMetricFamily(_PREFIX + name, text, labels=labels)
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
            counter = CounterMetricFamily(_PREFIX + name, text, labels=[*labels, label])
            for key, number in counts.items():
                counter.add_metric([self._model, str(key)], float(number))
            yield counter
        gauge = GaugeMetricFamily(
            _PREFIX + "speculation_expected_tokens_per_second",
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
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
            for phase, totals in phases:
                if (value := getattr(totals, field)) is not None:
                    gauge.add_metric([self._model, phase], value)
            yield gauge
        roof = roof_of(report) or {}
        for name, text, key in (
            ("ceiling_flops_per_second", "Measured ceiling of products.", "flops"),
            ("ceiling_bytes_per_second", "Measured ceiling of the memory.", "bandwidth"),
        ):
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"])
            if key in roof:
                gauge.add_metric([self._model], roof[key])
            yield gauge
        for name, text, field in (
            ("step_seconds", "Measured seconds of steps.", "seconds"),
            ("step_predicted_seconds", "What was predicted for them.", "predicted_s"),
            ("step_flops", "Useful floating-point operations.", "useful_flops"),
            ("step_bytes", "Bytes moved.", "moved_bytes"),
        ):
            counter = CounterMetricFamily(_PREFIX + name, text, labels=labels)
            for phase, totals in phases:
                if (value := getattr(totals, field)) is not None:
                    counter.add_metric([self._model, phase], value)
            yield counter

    def _cache_config(self) -> Metric:
        config = self._engine.config
        labels = {
            "model_name": self._model,
            "block_size": str(config.block_tokens),
            "num_gpu_blocks": str(sum(config.num_blocks)),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "cache_dtype": config.kv_cache_dtype,
        }
        gauge = GaugeMetricFamily(_PREFIX + "cache_config_info", "KV pool.", labels=list(labels))
        gauge.add_metric(list(labels.values()), 1.0)
        return gauge


def new_steps(steps: Sequence[StepRecord], last_id: int) -> list[StepRecord]:
    """The steps after ``last_id``; all of them if the engine has started anew."""
    if steps and steps[-1].step_id < last_id:
        return list(steps)
    return [step for step in steps if step.step_id > last_id]


def _aliases(text: bytes) -> bytes:
    """The lines of the aliased metrics once more, under vLLM's prefix."""
    lines = []
    for line in text.decode().splitlines():
        name = line.removeprefix("# HELP ").removeprefix("# TYPE ").removeprefix(_PREFIX)
        name = name.partition(" ")[0].partition("{")[0]
        stems = [name.removesuffix(end) for end in ("", "_bucket", "_count", "_sum", "_total")]
        if any(stem in ALIASED for stem in stems) and not name.endswith("_created"):
            lines.append(line.replace(_PREFIX, "vllm:", 1))
    return ("\n".join(lines) + "\n").encode()
