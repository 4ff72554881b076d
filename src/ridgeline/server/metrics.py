"""Prometheus metrics under our names, and a second time under those of vLLM."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import generate_latest

from ridgeline.core.request import CompletionChunk, RequestTimings
from ridgeline.engine.client import EngineClient
from ridgeline.engine.stats import StepRecord
from ridgeline.roofline.slo import SLO_NAMES, Slo, parse_slo
from ridgeline.server.config import ServerConfig
from ridgeline.server.keys import Caller
from ridgeline.server.metric_families import PREFIX, REQUESTS, MetricFamilies
from ridgeline.server.traffic import TrafficSketch

_KEPT_REQUESTS = 2048
_METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS")
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
    """Counts and measures what requests for a model see; the engine's own figures are read when
    asked for. ``beside`` are those of another model, with which one exposition has them all.
    """

    def __init__(
        self,
        engine: EngineClient,
        config: ServerConfig,
        model_name: str,
        *,
        beside: "Metrics | None" = None,
    ) -> None:
        families = MetricFamilies() if beside is None else beside._families
        self._families: MetricFamilies = families
        self._aliased = config.vllm_metrics
        self.registry = families.registry
        self.recent: deque[FinishedRequest] = deque(maxlen=_KEPT_REQUESTS)
        self.traffic = TrafficSketch()
        self.slo = Slo() if config.slo is None else parse_slo(config.slo)
        self.counts = dict.fromkeys(REQUESTS, 0)
        self._last_step = 0
        self.engine = engine
        self._model = model = (model_name,)
        self.ttft = families.ttft.labels(*model)
        self.publish = families.publish.labels(*model)
        self.stall = families.stall.labels(*model)
        self.itl = families.itl.labels(*model)
        self.tpot = families.tpot.labels(*model)
        self.e2e = families.e2e.labels(*model)
        self.queue = families.queue.labels(*model)
        self.prefill = families.prefill.labels(*model)
        self.decode = families.decode.labels(*model)
        self.inference = families.inference.labels(*model)
        self.iteration = families.iteration.labels(*model)
        self.success = families.success
        self.tokens, self.cost = families.tokens, families.cost
        self._requests = {name: family.labels(*model) for name, family in families.requests.items()}
        self._missed = families.missed
        for name, limit in self.slo.limits.items():
            families.limits.labels(*model, name).set(limit)
        for name in SLO_NAMES:
            self._missed.labels(*model, name)  # 0, and not nothing
        self._guard = families.guard
        self._guard_seconds = families.guard_seconds.labels(*model)
        self._http = families.http
        families.members.append(self)

    @property
    def model_name(self) -> str:
        return self._model[0]

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
        for step in new_steps(self.engine.stats().steps, self._last_step):
            self.iteration.observe(step.num_tokens)
            self._last_step = step.step_id

    def exposition(self, *, with_tenants: bool) -> bytes:
        """The text that Prometheus reads; ``with_tenants``: also what each key has used."""
        for each in self._families.members:
            each.observe_steps()
        text = generate_latest(self.registry)
        tenants = generate_latest(self._families.tenants) if with_tenants else b""
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


def new_steps(steps: Sequence[StepRecord], last_id: int) -> list[StepRecord]:
    """The steps after ``last_id``; all of them if the engine has started anew."""
    if steps and steps[-1].step_id < last_id:
        return list(steps)
    return [step for step in steps if step.step_id > last_id]


def _aliases(text: bytes) -> bytes:
    """The lines of the aliased metrics once more, under vLLM's prefix."""
    lines = []
    for line in text.decode().splitlines():
        name = line.removeprefix("# HELP ").removeprefix("# TYPE ").removeprefix(PREFIX)
        name = name.partition(" ")[0].partition("{")[0]
        stems = [name.removesuffix(end) for end in ("", "_bucket", "_count", "_sum", "_total")]
        if any(stem in ALIASED for stem in stems) and not name.endswith("_created"):
            lines.append(line.replace(PREFIX, "vllm:", 1))
    return ("\n".join(lines) + "\n").encode()
