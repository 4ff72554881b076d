"""What is going on, for people who watch."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.roofline.live import RooflineReport
from ridgeline.server.metrics import Metrics

_RATE_WINDOW_S = 5.0
_LATENCY_WINDOW_S = 300.0
_QUANTILES = (0.5, 0.9, 0.95, 0.99)


class LiveView:
    """Snapshots for one watcher; each has what was done since the one before."""

    def __init__(self, engine: AsyncEngine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._phases = phase_totals(engine.stats().roofline)
        self._totals: list[tuple[float, int, int]] = []  # (time, prompt tokens, output tokens)

    def snapshot(self) -> dict[str, Any]:
        """Rates over 5 s, latencies over 5 minutes, and a point of the roofline for each phase."""
        now = time.monotonic()
        stats = self._engine.stats()
        phases = phase_totals(stats.roofline)
        points = points_between(self._phases, phases)
        self._phases = phases
        self._totals.append((now, stats.prompt_tokens, stats.generated_tokens))
        self._totals = [entry for entry in self._totals if now - entry[0] <= _RATE_WINDOW_S]
        first = self._totals[0]
        seconds = max(now - first[0], 1e-9)
        recent = [r for r in self._metrics.recent if now - r.finished_s <= _LATENCY_WINDOW_S]
        return {
            "status": str(self._engine.health().status),
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_usage": stats.kv_usage,
            "prefix_hit_rate": (
                stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else None
            ),
            "preemptions": stats.num_preemptions,
            "prompt_tok_s": max(0.0, (stats.prompt_tokens - first[1]) / seconds),
            "output_tok_s": max(0.0, (stats.generated_tokens - first[2]) / seconds),
            "requests": len(recent),
            "ttft_s": quantiles([r.ttft_s for r in recent if r.ttft_s is not None]),
            "tpot_s": quantiles([r.tpot_s for r in recent if r.tpot_s is not None]),
            "points": points,
            "roof": roof_of(stats.roofline),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTotals:
    """What a phase has done up to now."""

    seconds: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    num_bytes: float = 0.0


def phase_totals(report: RooflineReport | None) -> dict[str, PhaseTotals]:
    """Totals by the name of the phase; empty where steps are not priced."""
    if report is None:
        return {}
    return {
        name: PhaseTotals(
            seconds=phase.seconds,
            tokens=phase.tokens,
            flops=phase.useful_flops,
            num_bytes=phase.moved_bytes,
        )
        for name, phase in (("prefill", report.prefill), ("decode", report.decode))
    }


def points_between(
    before: Mapping[str, PhaseTotals], now: Mapping[str, PhaseTotals]
) -> list[dict[str, Any]]:
    """One point for each phase that did something in between."""
    points = []
    for name, totals in now.items():
        first = before.get(name, PhaseTotals())
        if totals.seconds > first.seconds and totals.num_bytes > first.num_bytes:
            points.append(
                {
                    "kind": name,
                    "seconds": totals.seconds - first.seconds,
                    "tokens": totals.tokens - first.tokens,
                    "flops": totals.flops - first.flops,
                    "bytes": totals.num_bytes - first.num_bytes,
                }
            )
    return points


def roof_of(report: RooflineReport | None) -> dict[str, float] | None:
    """The machine's ceilings, FLOP/s and bytes/s; ``None`` where they were not measured."""
    for phase in () if report is None else (report.decode, report.prefill):
        if phase.mfu and phase.mbu and phase.seconds:
            return {
                "flops": phase.useful_flops / (phase.seconds * phase.mfu),
                "bandwidth": phase.moved_bytes / (phase.seconds * phase.mbu),
            }
    return None


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p95 and p99 by nearest rank; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        f"p{round(share * 100)}": ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        for share in _QUANTILES
    }
