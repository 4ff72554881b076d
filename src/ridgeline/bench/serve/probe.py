"""What an endpoint's speed says about it: prefill and decode speed, and where it saturates.

The loads are gone through several times, one after the other, so that what disturbs an endpoint for
a while disturbs all of them; a load's figures are those of all rounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from ridgeline.bench.serve.costs import Prices
from ridgeline.bench.serve.metrics import Quantile, RequestTrace, quantile, summarize
from ridgeline.bench.serve.session import Arrivals, LoadPoint, run_point
from ridgeline.bench.serve.targets import Target
from ridgeline.bench.serve.workload import Workload, parse_length
from ridgeline.roofline.slo import Slo

_SATURATED = 0.95  # of the most that any load gives
_IN_VAIN = 2  # loads in succession that give no more, after which larger ones are not tried
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPoint:
    """Time to the first token of prompts so long, alone; seconds.

    ``input_tokens`` are what the endpoint counts, where it tells.
    """

    input_tokens: float
    ttft_s: Quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """The least load that gives 95% of the most output of any: by the median of all rounds, and the
    least and the largest of the rounds."""

    concurrency: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttling:
    """Requests that were refused because there were too many (HTTP 429, 503), and at which load:
    the least at which that happened in most rounds. ``completed_rpm`` were answered meanwhile."""

    concurrency: int
    refused_share: float
    completed_rpm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """``prefill_tokens_s`` is the slope of TTFT over length, ``overhead_s`` its value at length 0.

    ``points`` are the loads, ``output_tokens_s`` of each the figures of its rounds. ``saturation``
    and ``throttling`` are ``None`` where neither was reached. ``error``: the first other failure.
    ``num_completed`` requests of all were answered.
    """

    lengths: Sequence[LengthPoint]
    prefill_tokens_s: float | None
    overhead_s: float | None
    points: Sequence[LoadPoint]
    output_tokens_s: Sequence[Sequence[float]]
    saturation: Saturation | None
    throttling: Throttling | None
    error: str | None
    num_completed: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; the points are those of ``ridgeline bench serve``."""
        points = [point.to_json() for point in self.points]
        return asdict(replace(self, points=())) | {"points": points}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """What to ask: prompts of ``input_lengths`` alone, then loads with the first of them.

    A load is ``requests`` a round, or twice its concurrency where that is more. Prompts are random
    token ids of ``vocab``; answers may be shorter than was asked.
    """

    input_lengths: Sequence[int]
    output_tokens: int
    concurrencies: Sequence[int]
    requests: int
    rounds: int
    vocab: range
    slo: Slo
    prices: Prices


async def probe(
    target: Target, plan: ProbePlan, *, progress: Progress = lambda _: None
) -> ProbeReport:
    """Measure an endpoint, first alone by length, then under more and more load."""
    lengths, traces = list[LengthPoint](), list[RequestTrace]()
    for number, length in enumerate(plan.input_lengths):
        progress(f"prompts of {length} tokens")
        count = plan.requests * plan.rounds
        point = await _run(target, plan, (length, 1), Arrivals(concurrency=1), count, seed=number)
        traces += point.traces
        done = [trace for trace in point.traces if trace.is_complete]
        if done:
            counted = median(trace.num_prompt_tokens for trace in done)
            ttft_s = quantile(sorted(trace.ttft_s for trace in done), 0.5)
            lengths.append(LengthPoint(input_tokens=counted, ttft_s=ttft_s))
    rounds = [await _sweep(target, plan, plan.concurrencies, 0, progress, stops=True)]
    loads = [point.load.concurrency or 1 for point in rounds[0]]
    for number in range(1, plan.rounds):
        rounds.append(await _sweep(target, plan, loads, number, progress))
    points = [_joined(each) for each in zip(*rounds, strict=True)]
    traces += [trace for point in points for trace in point.traces]
    outputs = [[each[at].summary.output_tokens_s for each in rounds] for at in range(len(points))]
    slope, overhead = _line(lengths)
    return ProbeReport(
        lengths=lengths,
        prefill_tokens_s=1 / slope if slope is not None and slope > 0 else None,
        overhead_s=overhead,
        points=points,
        output_tokens_s=outputs,
        saturation=saturation(loads, outputs),
        throttling=_throttling(loads, rounds, points),
        error=next((t.error for t in traces if t.error and not t.is_throttled), None),
        num_completed=sum(trace.is_complete for trace in traces),
    )


async def _sweep(
    target: Target,
    plan: ProbePlan,
    concurrencies: Sequence[int],
    number: int,
    progress: Progress,
    *,
    stops: bool = False,
) -> list[LoadPoint]:
    """One round; with ``stops`` to where requests are refused or fail, or output grows no more."""
    points: list[LoadPoint] = []
    most, in_vain = 0.0, 0
    for concurrency in concurrencies:
        progress(f"round {number + 1} of {plan.rounds}: {concurrency} requests at once")
        count = max(plan.requests, 2 * concurrency)
        load = Arrivals(concurrency=concurrency)
        seed = len(plan.input_lengths) + number * len(concurrencies) + len(points)
        sizes = (plan.input_lengths[0], plan.output_tokens)
        point = await _run(target, plan, sizes, load, count, seed=seed)
        points.append(point)
        got, failed = point.summary.output_tokens_s, point.summary.num_failed
        in_vain = in_vain + 1 if got < most / _SATURATED else 0
        most = max(most, got)
        is_refused = any(trace.is_throttled for trace in point.traces)
        if stops and (is_refused or failed == count or in_vain == _IN_VAIN):
            break
    return points


async def _run(
    target: Target,
    plan: ProbePlan,
    sizes: tuple[int, int],
    load: Arrivals,
    count: int,
    *,
    seed: int,
) -> LoadPoint:
    """Requests of ``sizes``: tokens in and out."""
    workload = Workload(
        num_conversations=count,
        input_length=parse_length(str(sizes[0])),
        output_length=parse_length(str(sizes[1])),
        seed=seed * 1009 + sizes[0],
        vocab=plan.vocab,
    )
    conversations = list(workload.conversations())
    return await run_point(
        target, load, conversations, slo=plan.slo, prices=plan.prices, may_be_short=True
    )


def _joined(rounds: Sequence[LoadPoint]) -> LoadPoint:
    """One load of all its rounds, as if each had begun when the one before ended."""
    traces: list[RequestTrace] = []
    end_s = 0.0
    for point in rounds:
        moved_s = end_s - min(trace.scheduled_s for trace in point.traces)
        traces += [_moved(trace, moved_s) for trace in point.traces]
        end_s = max(trace.finished_s for trace in traces)
    summary = summarize(traces, rounds[0].slo, is_open_loop=False)
    return replace(rounds[0], summary=summary, traces=traces)


def _moved(trace: RequestTrace, by_s: float) -> RequestTrace:
    published_s = trace.published_s
    return replace(
        trace,
        scheduled_s=trace.scheduled_s + by_s,
        sent_s=trace.sent_s + by_s,
        finished_s=trace.finished_s + by_s,
        chunk_times_s=tuple(at + by_s for at in trace.chunk_times_s),
        published_s=None if published_s is None else published_s + by_s,
    )


def saturation(loads: Sequence[int], outputs: Sequence[Sequence[float]]) -> Saturation | None:
    """From the output tokens/s of each load in each round.

    ``None`` if the largest load may still give more: if it is the first to come near the most.
    """
    if len(loads) < 2:
        return None
    middle = _least(loads, [median(each) for each in outputs])
    by_round = [_least(loads, each) for each in zip(*outputs, strict=True)]
    if middle == loads[-1] or not any(map(any, outputs)):
        return None
    return Saturation(concurrency=middle, low=min(by_round), high=max(by_round))


def _least(loads: Sequence[int], outputs: Sequence[float]) -> int:
    most = max(outputs)
    pairs = zip(loads, outputs, strict=True)
    return next(load for load, output in pairs if output >= _SATURATED * most)


def _throttling(
    loads: Sequence[int], rounds: Sequence[Sequence[LoadPoint]], points: Sequence[LoadPoint]
) -> Throttling | None:
    for at, load in enumerate(loads):
        refused = [sum(t.is_throttled for t in each[at].traces) for each in rounds]
        if 2 * sum(map(bool, refused)) > len(rounds):
            return Throttling(
                concurrency=load,
                refused_share=sum(refused) / len(points[at].traces),
                completed_rpm=60 * points[at].summary.completed_rate,
            )
    return None


def _line(points: Sequence[LengthPoint]) -> tuple[float | None, float | None]:
    """Least squares of the median TTFT over length: slope and intercept."""
    if len(points) < 2:
        return None, None
    xs: list[float] = [point.input_tokens for point in points]
    ys = [point.ttft_s.value for point in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread == 0:
        return None, None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    return slope, mean_y - slope * mean_x
