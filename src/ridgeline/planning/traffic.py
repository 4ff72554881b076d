"""What became of a workload: its requests' times, and the rates of a window of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, nextafter, sqrt

from ridgeline.core.request import RequestTimings
from ridgeline.planning.workload import Arrival
from ridgeline.roofline.metrics import shown_percentiles
from ridgeline.roofline.slo import Slo

_WARM_UP = 1 / 3  # share of the requests that arrive before the machine is in its steady state
_BEHIND = 0.05  # share of the load that may be left undone
_DEVIATIONS = 2  # of the number of requests in progress, which is random


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """What one request got, in seconds since its arrival; ``done_s`` is on the virtual clock."""

    arrival: Arrival
    timings: RequestTimings
    done_s: float

    def good(self, slo: Slo) -> bool:
        timings = self.timings
        return timings.ttft_s is not None and slo.met(
            ttft_s=timings.ttft_s, tpot_s=timings.tpot_s, end_to_end_s=timings.end_to_end_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What became of a workload, in the window from ``begin_s`` to ``end_s``.

    Latencies and shares are of the requests that arrived in the window. So are rates where the
    machine keeps up with them, since what is in progress at either end is a matter of chance; else
    they are of those that were completed while it was full. ``prefill_s`` and ``decode_s`` are what
    the phases took of the whole run. ``num_left_out`` requests were not simulated, as that would
    have taken too long.
    """

    answers: tuple[RequestTiming, ...]
    begin_s: float
    end_s: float
    prefill_s: float
    decode_s: float
    num_steps: int
    num_preemptions: int
    num_left_out: int = 0

    @property
    def seconds(self) -> float:
        """In which `completed` were."""
        begin_s, end_s = (self.begin_s, self.end_s) if self.keeps_up else self._full
        return end_s - begin_s

    @property
    def arrived(self) -> tuple[RequestTiming, ...]:
        """Requests that arrived in the window."""
        return tuple(a for a in self.answers if self.begin_s <= a.arrival.arrival_s <= self.end_s)

    @property
    def completed(self) -> tuple[RequestTiming, ...]:
        """Requests whose rate is that of completion."""
        return self.arrived if self.keeps_up else self._done(*self._full)

    @property
    def completed_rps(self) -> float:
        return len(self.completed) / self.seconds

    @property
    def output_tok_s(self) -> float:
        return sum(answer.arrival.output_tokens for answer in self.completed) / self.seconds

    @property
    def input_tok_s(self) -> float:
        return sum(answer.arrival.prompt_tokens for answer in self.completed) / self.seconds

    @property
    def mean_ttft_s(self) -> float:
        return _mean([a.timings.ttft_s for a in self.arrived if a.timings.ttft_s is not None])

    @property
    def mean_tpot_s(self) -> float:
        return _mean([a.timings.tpot_s for a in self.arrived if a.timings.tpot_s is not None])

    def latency_percentiles(self) -> dict[str, dict[str, float]]:
        """p50, p90, p95, and p99 of enough requests, of ``ttft_s`` and ``tpot_s``."""
        return {
            name: shown_percentiles(
                [s for a in self.arrived if (s := getattr(a.timings, name)) is not None]
            )
            for name in ("ttft_s", "tpot_s")
        }

    @property
    def mean_end_to_end_s(self) -> float:
        return _mean([a.timings.end_to_end_s for a in self.arrived])

    @property
    def keeps_up(self) -> bool:
        """Whether as many requests are completed as arrive, but for 5 % and for chance."""
        arrived = len(self.arrived)
        before = sum(a.arrival.arrival_s < self.begin_s < a.done_s for a in self.answers)
        done = len(self._done(self.begin_s, self.end_s))
        return arrived - done <= _BEHIND * arrived + _DEVIATIONS * sqrt(before)

    @property
    def _full(self) -> tuple[float, float]:
        """While a machine that falls behind is full: from a third of the answers to the last
        arrival, or to two thirds of the answers if that is later."""
        times = sorted(answer.done_s for answer in self.answers)
        third = len(times) // 3
        return times[third], max(self.end_s, times[2 * third])

    def _done(self, begin_s: float, end_s: float) -> tuple[RequestTiming, ...]:
        return tuple(answer for answer in self.answers if begin_s < answer.done_s <= end_s)

    def steady(self) -> "Traffic":
        """The part from a warm-up to the last arrival: neither filling nor emptying counts."""
        times = sorted(answer.arrival.arrival_s for answer in self.answers)
        warm_s = times[ceil(_WARM_UP * len(times)) - 1]
        return replace(self, begin_s=nextafter(warm_s, inf), end_s=times[-1])

    def slower(self, factor: float) -> "Traffic":
        """As if everything took ``factor`` times as long; true where all requests came at once."""

        def scaled(seconds: float | None) -> float | None:
            return None if seconds is None else seconds * factor

        answers = tuple(
            replace(
                answer,
                timings=replace(
                    answer.timings,
                    queue_s=answer.timings.queue_s * factor,
                    ttft_s=scaled(answer.timings.ttft_s),
                    tpot_s=scaled(answer.timings.tpot_s),
                    end_to_end_s=answer.timings.end_to_end_s * factor,
                ),
                done_s=answer.done_s * factor,
            )
            for answer in self.answers
        )
        return replace(self, answers=answers, end_s=self.end_s * factor)

    def goodput_rps(self, slo: Slo) -> float:
        return sum(answer.good(slo) for answer in self.completed) / self.seconds

    def attainment(self, slo: Slo) -> float:
        """The share of requests that meet every SLO."""
        return _mean([float(answer.good(slo)) for answer in self.arrived])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
