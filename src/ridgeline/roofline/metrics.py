"""Definitions of what is measured, so that every report means the same by a name."""

from collections.abc import Sequence
from math import floor

MIN_P99_SAMPLES = 1000  # of fewer, one or two decide


def mbu(moved_bytes: float, seconds: float, bytes_per_s: float) -> float:
    """Model bandwidth utilisation: bytes that must move ÷ (seconds × peak bandwidth).

    7B in 16 bits at 100 tokens/s on 2 TB/s:

    >>> f"{mbu(7e9 * 2, 1 / 100, 2e12):.0%}"
    '70%'
    """
    return moved_bytes / (seconds * bytes_per_s)


def mfu(useful_flops: float, seconds: float, flops_per_s: float) -> float:
    """Model FLOPs utilisation: useful FLOPs ÷ (seconds × peak dense FLOP/s)."""
    return useful_flops / (seconds * flops_per_s)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The percentile of a sorted sample, interpolated between the nearest ranks.

    Hyndman and Fan 1996, definition 7, which numpy uses. A mean hides what a percentile shows:

    >>> ttft_ms = sorted([100, 102, 100, 100, 99, 104, 110, 90, 3000, 95])
    >>> sum(ttft_ms) / len(ttft_ms), percentile(ttft_ms, 0.5), round(percentile(ttft_ms, 0.9))
    (390.0, 100.0, 399)
    >>> sum(each <= 110 for each in ttft_ms)
    9
    """
    position = share * (len(ordered) - 1)
    low = floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def shown_percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p95 of a sample, and p99 from 1,000 values on; empty without values.

    >>> shown_percentiles([3.0, 1.0, 2.0])["p50"], "p99" in shown_percentiles([1.0] * 999)
    (2.0, False)
    """
    ordered = sorted(values)
    shares = (50, 90, 95, 99) if len(ordered) >= MIN_P99_SAMPLES else (50, 90, 95)
    return {f"p{share}": percentile(ordered, share / 100) for share in shares if ordered}


def arrival_rate(arrivals_s: Sequence[float]) -> float | None:
    """Requests that arrive per second: gaps ÷ the time from the first arrival to the last, however
    long the answers take; ``None`` where all come at once.

    >>> arrival_rate([0.0, 0.5, 1.0]), arrival_rate([2.0, 2.0])
    (2.0, None)
    """
    span_s = max(arrivals_s) - min(arrivals_s)
    return (len(arrivals_s) - 1) / span_s if span_s > 0 else None


def goodput(met_every_slo: Sequence[bool], seconds: float) -> float:
    """Requests that meet every SLO, per second; failures are False.

    100 requests in a minute, of which 30 meet both: 30 a minute.

    >>> round(60 * goodput([True] * 30 + [False] * 70, 60), 9)
    30.0
    """
    return sum(met_every_slo) / seconds


def concurrency(rate_per_s: float, seconds: float) -> float:
    """Little's law: what is in progress at a rate. 42.23 tokens/s of 88.8 ms each:

    >>> f"{concurrency(42.23, 88.8e-3):.2f}"
    '3.75'
    """
    return rate_per_s * seconds
