"""What an endpoint's speed says about it: prefill and decode speed, and where it saturates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ridgeline.bench.serve.metrics import RequestTrace, Slo
from ridgeline.bench.serve.session import Load, Point, run_point
from ridgeline.bench.serve.targets import Target
from ridgeline.bench.serve.workload import Workload, parse_length

_MIN_GAIN = 1.05  # less output than this from twice the load is saturation
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPoint:
    """Median time to the first token of a prompt so long, alone; seconds.

    ``input_tokens`` are what the endpoint counts, where it tells.
    """

    input_tokens: float
    ttft_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """What so many requests at once got; seconds and tokens per second.

    ``num_failed`` count those that were ``num_throttled`` (HTTP 429, 503) too.
    """

    concurrency: int
    output_tokens_s: float
    ttft_p50_s: float | None
    tpot_p50_s: float | None
    num_failed: int
    num_throttled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """``prefill_tokens_s`` is the slope of TTFT over length, ``overhead_s`` its value at length 0.

    ``saturation``: the least load beyond which output hardly grows, ``throttled_at`` the least at
    which requests were refused because there were too many; ``None`` where neither was reached.
    ``error``: the first other failure. ``num_completed`` requests of all were answered.
    """

    lengths: Sequence[LengthPoint]
    prefill_tokens_s: float | None
    overhead_s: float | None
    loads: Sequence[LoadPoint]
    saturation: int | None
    throttled_at: int | None
    error: str | None
    num_completed: int


async def probe(
    target: Target,
    *,
    input_lengths: Sequence[int],
    output_tokens: int,
    concurrencies: Sequence[int],
    requests_per_point: int,
    vocab: range,
    progress: Progress = lambda _: None,
) -> ProbeReport:
    """Measure an endpoint, first alone by length, then under more and more load.

    Prompts are random token ids of ``vocab``; answers may be shorter than was asked.
    """
    lengths, traces = list[LengthPoint](), list[RequestTrace]()
    for length in input_lengths:
        progress(f"prompts of {length} tokens")
        point = await _run(target, length, 1, vocab, concurrency=1, count=requests_per_point)
        traces += point.traces
        if point.summary.ttft_s is not None:
            counted = median(t.num_prompt_tokens for t in point.traces if t.is_complete)
            ttft_s = point.summary.ttft_s.p50.value
            lengths.append(LengthPoint(input_tokens=counted, ttft_s=ttft_s))
    loads: list[LoadPoint] = []
    saturation = throttled_at = None
    for concurrency in concurrencies:
        progress(f"{concurrency} requests at once")
        count = max(requests_per_point, 2 * concurrency)
        point = await _run(
            target, input_lengths[0], output_tokens, vocab, concurrency=concurrency, count=count
        )
        traces += point.traces
        loads.append(_load_point(concurrency, point))
        if loads[-1].num_throttled:
            throttled_at = concurrency
        if loads[-1].num_throttled or point.summary.num_failed == point.summary.num_requests:
            break
        if len(loads) > 1:
            gain = loads[-1].output_tokens_s / max(loads[-2].output_tokens_s, 1e-9)
            if gain < _MIN_GAIN:
                saturation = loads[-2].concurrency
                break
    slope, overhead = _line(lengths)
    return ProbeReport(
        lengths=lengths,
        prefill_tokens_s=1 / slope if slope is not None and slope > 0 else None,
        overhead_s=overhead,
        loads=loads,
        saturation=saturation,
        throttled_at=throttled_at,
        error=next((t.error for t in traces if t.error and not t.is_throttled), None),
        num_completed=sum(trace.is_complete for trace in traces),
    )


async def _run(
    target: Target,
    input_tokens: int,
    output_tokens: int,
    vocab: range,
    *,
    concurrency: int,
    count: int,
) -> Point:
    workload = Workload(
        num_conversations=count,
        input_length=parse_length(str(input_tokens)),
        output_length=parse_length(str(output_tokens)),
        seed=input_tokens * 1009 + concurrency,
        vocab=vocab,
    )
    load = Load(concurrency=concurrency)
    conversations = list(workload.conversations())
    return await run_point(target, load, conversations, slo=Slo(), may_be_short=True)


def _load_point(concurrency: int, point: Point) -> LoadPoint:
    summary = point.summary
    return LoadPoint(
        concurrency=concurrency,
        output_tokens_s=summary.output_tokens_s,
        ttft_p50_s=summary.ttft_s.p50.value if summary.ttft_s else None,
        tpot_p50_s=summary.tpot_s.p50.value if summary.tpot_s else None,
        num_failed=summary.num_failed,
        num_throttled=sum(trace.is_throttled for trace in point.traces),
    )


def _line(points: Sequence[LengthPoint]) -> tuple[float | None, float | None]:
    """Least squares of TTFT over length: slope and intercept."""
    if len(points) < 2:
        return None, None
    xs: list[float] = [point.input_tokens for point in points]
    ys = [point.ttft_s for point in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread == 0:
        return None, None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    return slope, mean_y - slope * mean_x


def implied_bandwidth(weights_bytes: float, tpot_s: float) -> dict[str, Any]:
    """Bytes per second that a model of these weights would have read for one token alone."""
    return {"weights_bytes": weights_bytes, "bytes_per_s": weights_bytes / tpot_s}
