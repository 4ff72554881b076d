"""What is going on, for people who watch."""

import time
from collections.abc import Sequence
from typing import Any

from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.engine.stats import StepRecord
from ridgeline.server.metrics import Metrics, new_steps

_RATE_WINDOW_S = 5.0
_LATENCY_WINDOW_S = 300.0
_MAX_STEPS = 200
_QUANTILES = (0.5, 0.9, 0.95, 0.99)


class LiveView:
    """Snapshots for one watcher; each has the steps since the one before."""

    def __init__(self, engine: AsyncEngine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._last_step = 0
        self._totals: list[tuple[float, int, int]] = []  # (time, prompt tokens, output tokens)

    def snapshot(self) -> dict[str, Any]:
        """Rates over 5 s, latencies over 5 minutes, the latest steps."""
        now = time.monotonic()
        stats = self._engine.stats()
        steps = new_steps(stats.steps, self._last_step)[-_MAX_STEPS:]
        if steps:
            self._last_step = steps[-1].step_id
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
            "steps": [step_point(step) for step in steps],
        }


def step_point(step: StepRecord) -> dict[str, Any]:
    """A step as the page draws it."""
    return {
        "id": step.step_id,
        "seconds": step.seconds,
        "tokens": step.num_tokens,
        "sequences": step.num_sequences,
        "is_prefill": step.num_tokens > step.num_sequences * step.num_steps,
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p95 and p99 by nearest rank; empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        f"p{round(share * 100)}": ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        for share in _QUANTILES
    }
