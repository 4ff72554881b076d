"""Latency, throughput and goodput from recorded requests; pure arithmetic.

The definitions are those of docs/metrics.md. A request starts when it was *scheduled* to be sent,
so a load generator that falls behind makes figures worse, not better.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.roofline.metrics import (
    MIN_P99_SAMPLES,
    arrival_rate,
    concurrency,
    goodput,
    percentile,
)
from ridgeline.roofline.slo import Slo

_ONE_PIECE_S = 2e-5  # of TPOT, below which all tokens were there when the first was read
_Z95 = 1.959964  # two-sided 95% of the normal distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """What was recorded of one request; times in seconds on one clock.

    ``chunk_times_s[i]`` is when ``chunk_tokens[i]`` (> 0) output tokens came, ``published_s`` when
    there was the first text that a user sees: no reasoning, no call of a tool; ``None`` if there
    was none. ``queue_s`` is what the server says of its own queue, ``None`` where it says nothing.
    ``error`` is ``None`` if the request was completed, and ``is_throttled`` says that there were
    too many (HTTP 429, 503).
    """

    scheduled_s: float
    sent_s: float
    finished_s: float
    num_prompt_tokens: int
    chunk_times_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    published_s: float | None = None
    num_cached_tokens: int = 0
    queue_s: float | None = None
    user: int = 0
    error: str | None = None
    is_throttled: bool = False

    @property
    def is_complete(self) -> bool:
        return self.error is None and bool(self.chunk_times_s)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.chunk_tokens)

    @property
    def ttft_s(self) -> float:
        """Scheduled start to the first non-empty output token."""
        return self.chunk_times_s[0] - self.scheduled_s

    @property
    def time_to_publish_s(self) -> float | None:
        """Scheduled start to the first text that the user sees."""
        return None if self.published_s is None else self.published_s - self.scheduled_s

    @property
    def end_to_end_s(self) -> float:
        """Scheduled start to the last output token."""
        return self.chunk_times_s[-1] - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """(End to end − TTFT) / (n − 1); ``None`` for n ≤ 1."""
        tokens = self.num_output_tokens
        return None if tokens <= 1 else (self.end_to_end_s - self.ttft_s) / (tokens - 1)

    @property
    def stall_s(self) -> float | None:
        """The largest gap between consecutive chunks; ``None`` for a single chunk."""
        return max(self._gaps(), default=None)

    def is_good(self, slo: Slo) -> bool:
        """Completed, and within every limit."""
        return self.is_complete and slo.met(
            ttft_s=self.ttft_s, tpot_s=self.tpot_s, end_to_end_s=self.end_to_end_s
        )

    def token_gaps_s(self) -> list[float]:
        """Gaps per token: m tokens that come together after a gap g count as m gaps of g / m."""
        gaps = zip(self._gaps(), self.chunk_tokens[1:], strict=True)
        return [gap / count for gap, count in gaps for _ in range(count)]

    def _gaps(self) -> list[float]:
        times = self.chunk_times_s
        return [after - before for before, after in itertools.pairwise(times)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantile:
    """A percentile and its 95% confidence interval, ``None`` where the sample is too small."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A sample: its size, mean, extremes, and p50, p90, p95 and p99 (which 1,000 samples allow)."""

    count: int
    mean: float
    minimum: float
    maximum: float
    p50: Quantile
    p90: Quantile
    p95: Quantile
    p99: Quantile | None


def quantile(ordered: Sequence[float], share: float) -> Quantile:
    """A percentile with the interval between two order statistics that holds it at 95%.

    Distribution-free, by the normal approximation to the binomial (Conover 1999, section 3.2);
    a bound whose rank lies outside the sample is ``None``.
    """
    count = len(ordered)
    centre, spread = count * share, _Z95 * math.sqrt(count * share * (1 - share))
    low, high = math.ceil(centre - spread), math.ceil(centre + spread)  # ranks from 1
    return Quantile(
        value=percentile(ordered, share),
        low=ordered[low - 1] if low >= 1 else None,
        high=ordered[high - 1] if high <= count else None,
    )


def distribution(values: Sequence[float]) -> Distribution | None:
    """Percentiles of a sample; ``None`` of an empty one."""
    if not values:
        return None
    ordered = sorted(values)
    return Distribution(
        count=len(ordered),
        mean=sum(ordered) / len(ordered),
        minimum=ordered[0],
        maximum=ordered[-1],
        p50=quantile(ordered, 0.5),
        p90=quantile(ordered, 0.9),
        p95=quantile(ordered, 0.95),
        p99=quantile(ordered, 0.99) if len(ordered) >= MIN_P99_SAMPLES else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LittlesLaw:
    """Little 1961: L = λW over the middle of a run, where arrivals and departures balance.

    ``concurrency``: time average of requests in the system; ``expected``: arrivals per second ×
    mean seconds of those that arrived. They differ by more than 5% if the run was not steady.
    """

    concurrency: float
    expected: float

    @property
    def is_steady(self) -> bool:
        return abs(self.concurrency - self.expected) <= 0.05 * self.concurrency


def littles_law(
    traces: Sequence[RequestTrace], *, skip: float = 0.15, min_requests: int = 50
) -> LittlesLaw | None:
    """Check the run without its first and last ``skip`` share; ``None`` for too small a sample."""
    done = [trace for trace in traces if trace.is_complete]
    starts = sorted(trace.scheduled_s for trace in done)
    if len(starts) < min_requests:
        return None
    first = starts[int(len(starts) * skip)]
    last = starts[int(len(starts) * (1 - skip)) - 1]
    if last <= first:
        return None
    arrived = [trace for trace in done if first <= trace.scheduled_s < last]
    spans = ((trace.scheduled_s, trace.scheduled_s + trace.end_to_end_s) for trace in done)
    inside_s = sum(max(0.0, min(end, last) - max(start, first)) for start, end in spans)
    mean_s = sum(trace.end_to_end_s for trace in arrived) / len(arrived)
    return LittlesLaw(
        concurrency=inside_s / (last - first),
        expected=concurrency(len(arrived) / (last - first), mean_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLengths:
    """Requests whose input has from ``low`` to ``high`` tokens, and their TTFT."""

    low: int
    high: int
    ttft_s: Distribution


def ttft_by_input(traces: Sequence[RequestTrace], *, most: int = 4) -> tuple[InputLengths, ...]:
    """TTFT against input length: completed requests by length, as many in each of ``most`` parts;
    requests of one length stay together."""
    ordered = sorted(traces, key=lambda trace: trace.num_prompt_tokens)
    lengths = [trace.num_prompt_tokens for trace in ordered]
    cuts = {bisect_left(lengths, lengths[len(lengths) * i // most]) for i in range(most) if lengths}
    parts = itertools.pairwise([*sorted(cuts), len(lengths)])
    found = (
        (ordered[low:high], distribution([t.ttft_s for t in ordered[low:high]]))
        for low, high in parts
    )
    return tuple(
        InputLengths(low=part[0].num_prompt_tokens, high=part[-1].num_prompt_tokens, ttft_s=ttft_s)
        for part, ttft_s in found
        if ttft_s is not None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything that is said of a run; seconds, tokens per second, requests per second.

    ``wall_s`` is from the first scheduled start to the last end. ``request_rate`` is that of the
    arrivals, whenever they were answered; ``None`` in a closed loop, where answers make them.
    ``goodput`` counts failures against it, since only good requests are in it. ``user_tokens_s`` is
    1 / TPOT of each request but those that came in one piece. ``num_single_token`` requests have no
    TPOT, ``num_unpublished`` showed a user nothing. ``first_error`` is that of the first that
    failed. ``ttft_by_input`` is of the requests by their input tokens: as many to a part as there
    are, in four parts at the most.
    """

    num_requests: int
    num_failed: int
    first_error: str | None
    num_single_token: int
    num_unpublished: int
    wall_s: float
    request_rate: float | None
    completed_rate: float
    goodput: float
    good_share: float
    input_tokens_s: float
    output_tokens_s: float
    cached_share: float
    mean_concurrency: float
    ttft_s: Distribution | None
    time_to_publish_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    stall_s: Distribution | None
    end_to_end_s: Distribution | None
    queue_s: Distribution | None
    dispatch_delay_s: Distribution | None
    user_tokens_s: Distribution | None
    littles_law: LittlesLaw | None
    ttft_by_input: tuple[InputLengths, ...]


def summarize(
    traces: Sequence[RequestTrace], slo: Slo | None = None, *, is_open_loop: bool = True
) -> Summary:
    """Figures of a run with at least one request."""
    slo = slo or Slo()
    done = [trace for trace in traces if trace.is_complete]
    wall_s = max(t.finished_s for t in traces) - min(t.scheduled_s for t in traces)
    good = [trace.is_good(slo) for trace in traces]
    published = [at for trace in done if (at := trace.time_to_publish_s) is not None]
    tpots = [tpot for trace in done if (tpot := trace.tpot_s) is not None]
    prompt_tokens = sum(trace.num_prompt_tokens for trace in done)
    cached_tokens = sum(trace.num_cached_tokens for trace in done)
    return Summary(
        num_requests=len(traces),
        num_failed=len(traces) - len(done),
        first_error=next((trace.error for trace in traces if trace.error), None),
        num_single_token=len(done) - len(tpots),
        num_unpublished=len(done) - len(published),
        wall_s=wall_s,
        request_rate=arrival_rate([t.scheduled_s for t in traces]) if is_open_loop else None,
        completed_rate=len(done) / wall_s,
        goodput=goodput(good, wall_s),
        good_share=sum(good) / len(traces),
        input_tokens_s=prompt_tokens / wall_s,
        output_tokens_s=sum(trace.num_output_tokens for trace in done) / wall_s,
        cached_share=cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        mean_concurrency=sum(trace.end_to_end_s for trace in done) / wall_s,
        ttft_s=distribution([trace.ttft_s for trace in done]),
        time_to_publish_s=distribution(published),
        tpot_s=distribution(tpots),
        itl_s=distribution([gap for trace in done for gap in trace.token_gaps_s()]),
        stall_s=distribution([gap for trace in done if (gap := trace.stall_s) is not None]),
        end_to_end_s=distribution([trace.end_to_end_s for trace in done]),
        queue_s=distribution([t.queue_s for t in done if t.queue_s is not None]),
        dispatch_delay_s=distribution([trace.sent_s - trace.scheduled_s for trace in traces]),
        user_tokens_s=distribution([1 / tpot for tpot in tpots if tpot > _ONE_PIECE_S]),
        littles_law=littles_law(traces),
        ttft_by_input=ttft_by_input(done),
    )
