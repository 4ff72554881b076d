"""A sketch of what is asked of a server: lengths, arrivals and hits, and no text of anybody."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ridgeline.roofline.live import RooflineReport
from ridgeline.server.drift import Alarm, DriftWatch, Watched

_KEPT_REQUESTS = 4096
_KEPT_ALARMS = 64
_WATCHED = {
    "prompt_tokens": Watched(least=1.5),
    "output_tokens": Watched(least=1.5),
    "arrival_gap_s": Watched(least=1.5),
    "cached_share": Watched(least=0.15, is_ratio=False),
    "prefill_measured_over_predicted": Watched(least=1.25, batch=4),
    "decode_measured_over_predicted": Watched(least=1.25, batch=4),
}
_SHORTEST_GAP_S = 1e-4
_PERIOD_S = 15.0  # between looks at how far predictions are off


class TrafficCounts(Protocol):
    """What is noted of a call."""

    arrival_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """``at_s`` is its arrival on the monotonic clock."""

    at_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class TrafficSketch:
    """The latest requests, and alarms where they are no longer what they were."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._seen: deque[SeenRequest] = deque(maxlen=_KEPT_REQUESTS)
        self._watch = DriftWatch(_WATCHED)
        self._last_arrival_s: float | None = None
        self._last_look_s = 0.0
        self._bias: dict[str, float] = {}  # measured over predicted seconds, by phase
        self.alarms: deque[Alarm] = deque(maxlen=_KEPT_ALARMS)
        self.num_alarms = dict.fromkeys(_WATCHED, 0)

    def note(self, call: TrafficCounts) -> None:
        """A request was answered to its end."""
        if not call.prompt_tokens or not call.output_tokens:
            return
        self._seen.append(
            SeenRequest(call.arrival_s, call.prompt_tokens, call.cached_tokens, call.output_tokens)
        )
        self._add("prompt_tokens", call.prompt_tokens)
        self._add("output_tokens", call.output_tokens)
        self._add("cached_share", call.cached_tokens / call.prompt_tokens)
        if self._last_arrival_s is not None:
            gap_s = abs(call.arrival_s - self._last_arrival_s)
            self._add("arrival_gap_s", max(gap_s, _SHORTEST_GAP_S))
        self._last_arrival_s = call.arrival_s

    def look(self, report: RooflineReport | None) -> None:
        """Note how far predictions are off, now and then; for whoever reads the engine's figures
        anyway."""
        now_s = self._clock()
        if report is None or now_s - self._last_look_s < _PERIOD_S:
            return
        self._last_look_s = now_s
        for phase, figures in (("prefill", report.prefill), ("decode", report.decode)):
            if figures.bias:
                self._bias[phase] = figures.bias
                self._add(f"{phase}_measured_over_predicted", figures.bias)

    def to_json(self, *, settings: Mapping[str, object]) -> dict[str, Any]:
        """What ``/admin/traffic`` says: requests as lines of a trace, in order of arrival, how
        far off the calibration is, alarms, and ``settings``, those that are not the defaults."""
        seen = sorted(self._seen, key=lambda each: each.at_s)
        begin_s = seen[0].at_s if seen else 0.0
        return {
            "settings": dict(settings),
            "requests": [
                {
                    "at_s": round(each.at_s - begin_s, 4),
                    "prompt_tokens": each.prompt_tokens,
                    "output_tokens": each.output_tokens,
                    "cached_tokens": each.cached_tokens,
                }
                for each in seen
            ],
            "measured_over_predicted": dict(self._bias),
            "alarms": [asdict(alarm) for alarm in self.alarms],
        }

    def _add(self, quantity: str, value: float) -> None:
        alarm = self._watch.add(quantity, value, at_s=self._clock())
        if alarm is not None:
            self.alarms.append(alarm)
            self.num_alarms[quantity] += 1
