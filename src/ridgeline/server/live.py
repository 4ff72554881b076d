"""What is going on, for people who watch."""

import time
from collections import deque
from typing import Any

from ridgeline.engine.client import Monitored
from ridgeline.roofline.live import RooflineReport
from ridgeline.roofline.metrics import shown_percentiles
from ridgeline.roofline.utilization import roof_of, utilization_between
from ridgeline.server.metrics import Metrics

_RATE_WINDOW_S = 5.0
_USE_WINDOW_S = 10.0
_LATENCY_WINDOW_S = 300.0
_MINUTE_S = 60.0


class RecentUse:
    """How much of itself an engine used in the last seconds, for those who ask now and then."""

    def __init__(self) -> None:
        self._reports: deque[tuple[float, RooflineReport]] = deque()

    def shares(self, report: RooflineReport | None) -> tuple[float | None, float | None]:
        """Of the time, in which steps ran; and in these, of the bytes that memory could have moved
        (MBU). ``None``: not known, as without a calibration."""
        if report is None:
            return None, None
        now_s, reports = time.monotonic(), self._reports
        while len(reports) > 1 and now_s - reports[0][0] > _USE_WINDOW_S:
            reports.popleft()
        reports.append((now_s, report))
        if (seconds := now_s - reports[0][0]) <= 0:
            return None, None
        uses = utilization_between(reports[0][1], report).values()
        could_bytes = sum(each.moved_bytes / each.mbu for each in uses if each.mbu)
        moved_bytes = sum(each.moved_bytes for each in uses if each.mbu)
        busy = min(1.0, sum(each.seconds for each in uses) / seconds)
        return busy, moved_bytes / could_bytes if could_bytes else None


class LiveView:
    """Snapshots for one watcher; each has what was done since the one before."""

    def __init__(self, engine: Monitored, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._report = engine.stats().roofline
        self._totals: list[tuple[float, int, int]] = []  # (time, prompt tokens, output tokens)
        self._requests: list[tuple[float, dict[str, int]]] = []

    def snapshot(self) -> dict[str, Any]:
        """Tokens over 5 s, requests over a minute, latencies over 5 minutes, and what each phase
        did since the last snapshot."""
        now = time.monotonic()
        stats = self._engine.stats()
        uses = utilization_between(self._report, stats.roofline)
        self._report = stats.roofline
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
            **self._rates(now),
            "slo": str(self._metrics.slo),
            "ttft_s": shown_percentiles([r.ttft_s for r in recent]),
            "publish_s": shown_percentiles(
                [r.publish_s for r in recent if r.publish_s is not None]
            ),
            "tpot_s": shown_percentiles([r.tpot_s for r in recent if r.tpot_s is not None]),
            "stall_s": shown_percentiles([r.stall_s for r in recent if r.stall_s is not None]),
            "points": [
                {
                    "kind": phase,
                    "seconds": use.seconds,
                    "tokens": use.tokens,
                    "flops": use.useful_flops,
                    "bytes": use.moved_bytes,
                    "mfu": use.mfu,
                    "mbu": use.mbu,
                }
                for phase, use in uses.items()
            ],
            "roof": roof_of(stats.roofline),
            "levels": {} if stats.roofline is None else stats.roofline.levels,
        }

    def _rates(self, now: float) -> dict[str, Any]:
        """Requests per minute, over the last one or since the watcher came; and how many of those
        that ended were good."""
        self._requests.append((now, dict(self._metrics.counts)))
        self._requests = [each for each in self._requests if now - each[0] <= _MINUTE_S]
        then, before = self._requests[0]
        minutes = max(now - then, 1.0) / 60
        new = {name: count - before[name] for name, count in self._metrics.counts.items()}
        ended = new["completed"] + new["failed"]
        return {
            "rpm": {name: count / minutes for name, count in new.items()},
            "good_share": new["good"] / ended if ended else None,
        }
