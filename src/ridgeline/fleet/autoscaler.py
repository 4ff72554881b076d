"""The autoscaler: asks every few seconds how many engines are wanted, has it done, and keeps what
was predicted beside what came."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ridgeline.fleet.control import FleetControl
from ridgeline.fleet.engines import RoutedEngine
from ridgeline.fleet.forecast import INTERVAL_S, ArrivalForecast, ExpectedLoad
from ridgeline.fleet.forwarding import ForwardedTimes
from ridgeline.fleet.light_simulation import ReplicaLoad
from ridgeline.fleet.requests import RoutedRequest
from ridgeline.fleet.router import PREFIX
from ridgeline.fleet.scaling import ScalingDecision, ScalingGoal, ScalingPolicy
from ridgeline.scheduler.prediction import DEFAULT_CURVE, LinearPredictor, StepCurve

_log = logging.getLogger(__name__)
_KEPT = 32  # decisions
_SPEEDS = 64  # streams whose pace is remembered
_FEWEST = 8  # of these, and tokens of one, mean something
_MOST_ANSWERS = 1 << 16


@dataclass(slots=True, kw_only=True)
class DecisionRecord:
    """A decision that changed the fleet. ``came`` is what came of it, once that is known: requests
    a second, and the share of them that kept the limits."""

    at_s: float
    decision: ScalingDecision
    from_s: float
    until_s: float
    came: dict[str, float] | None = None

    @property
    def predicted(self) -> float | None:
        """The share with as many as are wanted."""
        decision = self.decision
        return {**decision.if_many, **decision.if_few}.get(decision.wanted)

    def told(self, now_s: float) -> dict[str, Any]:
        """As ``/fleet/state`` says it."""
        decision = self.decision
        return {
            "seconds_ago": round(now_s - self.at_s, 1),
            "present": decision.present,
            "wanted": decision.wanted,
            "reason": decision.reason,
            "predicted": {
                "requests_per_s": round(decision.expected.p50_rps, 3),
                "burst_requests_per_s": round(decision.expected.burst_rps, 3),
                "within_limits": self.predicted,
            },
            "came": self.came,
        }


@dataclass(slots=True)
class _Pace:
    """How much longer tokens take than predicted: a low quantile, since prompts of others only ever
    delay a stream, and the simulation counts those itself."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_SPEEDS))

    @property
    def is_known(self) -> bool:
        return len(self.ratios) >= _FEWEST

    @property
    def factor(self) -> float:
        return sorted(self.ratios)[len(self.ratios) // 4] if self.is_known else 1.0


class Autoscaler:
    """Decides for a router. Where nothing starts engines, the number that is wanted is only told.

    Engines that have joined serve, too, while they are up: they are no part of the number that is
    wanted, nor of its bounds.

    Engines without a calibration have no predicted seconds: then nothing is decided before some
    streams have shown their pace, by which every prediction is corrected. ``say`` hears a line of
    each decision, and later one of what came of it.
    """

    def __init__(
        self, control: FleetControl, goal: ScalingGoal, *, say: Callable[[str], object] = _log.info
    ) -> None:
        self._control, self._say = control, say
        self._goal = goal
        self._policy = ScalingPolicy(goal, start_s=control.start_s)
        self._begin_s = asyncio.get_running_loop().time()
        self._forecast = ArrivalForecast(self._begin_s, ahead_s=self._policy.ahead_s)
        self._pace = _Pace()
        self._answers: deque[tuple[float, bool]] = deque(maxlen=_MOST_ANSWERS)
        self._wanted_since_s = self._begin_s
        self._records: deque[DecisionRecord] = deque(maxlen=_KEPT)
        self.wanted = max(goal.min_replicas, len(control.owned))
        self._last: ScalingDecision | None = None

    def note_arrival(self, request: RoutedRequest) -> int:
        """A request that the model will run for; returns the tokens of its prompt to compute."""
        wanted = request.wanted
        engines = self._control.router.engines
        cached = max(each.tracker.prefixes.cached_tokens(request.blocks) for each in engines)
        tokens = max(1, wanted.prompt_tokens - cached)
        self._forecast.note(asyncio.get_running_loop().time(), tokens, wanted.output_tokens)
        return tokens

    def take_back(self, arrival_s: float, prompt_tokens: int) -> None:
        """The model will not run for it: who has no key, or has used it up, starts no engines."""
        self._forecast.take_back(arrival_s, prompt_tokens)

    def note_answer(self, arrival_s: float, times: ForwardedTimes, *, is_whole: bool) -> None:
        """It has ended. One that is no stream has no first token: it is good if it takes no longer
        than both limits allow; one that failed is not."""
        now_s, slo = asyncio.get_running_loop().time(), self._goal.slo
        tokens = max(1, times.output_tokens)
        first_s = now_s if times.first_s is None else times.first_s
        is_good = slo.met(
            ttft_s=first_s - arrival_s,
            tpot_s=(now_s - first_s) / max(1, tokens - 1),
            end_to_end_s=now_s - arrival_s,
        )
        if times.first_s is None and slo.ttft_s is not None:
            most_s = slo.ttft_s + (slo.tpot_s or 0.0) * (tokens - 1)
            is_good = now_s - arrival_s <= min(most_s, slo.end_to_end_s or most_s)
        self._answers.append((arrival_s, is_good and is_whole))
        if times.output_tokens:
            self._forecast.note_output(times.output_tokens)
        if times.engine is not None and times.first_s is not None and tokens >= _FEWEST:
            tracker = times.engine.tracker
            context = tracker.context_tokens if tracker.num_running else 0
            step_s = _curve(times.engine).step_s(times.num_running, context)
            self._pace.ratios.append((now_s - first_s) / (tokens - 1) / step_s)

    async def run(self) -> None:
        """Decide until it is cancelled; a decision that fails is logged, and not the last."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.decide()
            except Exception:
                _log.exception("It could not be decided how many engines are wanted.")

    async def decide(self) -> None:
        """Decide once, and begin what follows."""
        loop, control = asyncio.get_running_loop(), self._control
        now_s = loop.time()
        self._judge(now_s)
        if not self._pace.is_known and not any(map(_is_calibrated, control.staying)):
            return
        self._policy.start_s = control.start_s
        self._forecast.look_ahead(self._policy.ahead_s)
        num_joined = self._num_joined
        self._policy.goal = replace(
            self._goal,
            min_replicas=self._goal.min_replicas + num_joined,
            max_replicas=self._goal.max_replicas + num_joined,
        )
        loads, expected = self._loads(now_s), self._forecast.expected(now_s)
        decision = await asyncio.to_thread(self._policy.decide, now_s, loads, expected)
        self._last = decision
        wanted = decision.wanted - num_joined
        if wanted == self.wanted and decision.wanted == decision.present:
            return
        if wanted != self.wanted:
            self._wanted_since_s = now_s
            if decision.wanted != decision.present:  # else it was changed by hand
                self._record(now_s, decision)
        self.wanted = wanted
        self._carry_out()

    @property
    def _num_joined(self) -> int:
        """Engines that serve and were not started here."""
        return sum(each.is_joined and each.is_up for each in self._control.staying)

    def _carry_out(self) -> None:
        """Begin what is lacking now: others may have come or gone by hand while it was decided."""
        control = self._control
        if control.replicas is None:
            return
        lacking = self.wanted - len(control.owned) - len(control.starting)
        for _ in range(lacking):
            control.spawn(control.add())
        able = sorted(control.owned[1:], key=lambda each: (each.is_up, each.tracker.num_requests))
        for engine in able[: max(0, -lacking)]:
            control.spawn(control.retire(engine))

    def _record(self, now_s: float, decision: ScalingDecision) -> None:
        policy = self._policy
        from_s = now_s + (policy.start_s if decision.wanted > decision.present else 0.0)
        record = DecisionRecord(
            at_s=now_s, decision=decision, from_s=from_s, until_s=now_s + policy.ahead_s
        )
        self._records.append(record)
        self._say(
            f"From {decision.present} engines to {decision.wanted}: {decision.reason} "
            f"{decision.expected.p50_rps:.3g} requests a second are expected."
        )

    def _judge(self, now_s: float) -> None:
        """What came of decisions whose time is over; long answers still run then."""
        for record in self._records:
            if record.came is not None or now_s < record.until_s:
                continue
            good = [is_good for at_s, is_good in self._answers
                    if record.from_s <= at_s < record.until_s]  # fmt: skip
            seconds = record.until_s - record.from_s
            record.came = {"requests_per_s": round(len(good) / seconds, 3)}
            if good:
                record.came["within_limits"] = sum(good) / len(good)
            self._say(
                f"With {record.decision.wanted} engines {_percent(record.predicted)} of the "
                f"requests were to keep the limits: {_percent(record.came.get('within_limits'))} "
                f"did, of {record.came['requests_per_s']:.3g} a second."
            )

    def _loads(self, now_s: float) -> list[ReplicaLoad]:
        """Engines that stay, and those that start; one that does not answer starts again."""
        control, start_s = self._control, self._control.start_s
        loads = list[ReplicaLoad]()
        for engine in control.staying:
            load = self._load(engine)
            if engine.is_up:
                loads.append(load)
            elif control.replicas is not None and not engine.is_joined:
                loads.append(load.as_new(start_s))
        like = self._load(control.staying[0])
        waits = [max(0.0, begin_s + start_s - now_s) for begin_s in control.starting]
        if control.replicas is None:  # whoever starts them has heard what was wanted
            left_s = max(0.0, self._wanted_since_s + start_s - now_s)
            lacking = self.wanted + self._num_joined - len(loads)
            waits = [left_s] * max(0, lacking) if left_s else []
        return loads + [like.as_new(wait_s) for wait_s in waits] or [like.as_new(start_s)]

    def _load(self, engine: RoutedEngine) -> ReplicaLoad:
        state, factor = engine.state, self._pace.factor
        linear = LinearPredictor(
            pass_s=factor * state.pass_s,
            token_s=factor * state.token_s,
            pair_s=factor * state.pair_s,
        )
        choice = engine.tracker.choice(
            engine.name, (), linear=linear, pass_s=linear.pass_s, max_seqs=state.max_seqs
        )
        return ReplicaLoad(
            load=choice.load, curve=_curve(engine).slower(factor), kv_tokens=state.kv_tokens
        )

    def collect(self) -> list[Metric]:
        """For Prometheus."""
        control = self._control
        families = [
            _gauge("wanted_replicas", "Engines that are wanted.", self.wanted),
            _gauge("replicas", "Those that are there and stay.", len(control.owned)),
            _gauge("starting_replicas", "Engines that start.", len(control.starting)),
            _gauge("start_seconds", "What an engine takes to start.", control.start_s),
        ]
        if (last := self._last) is not None:
            rate_rps = last.expected.p50_rps
            families.append(_gauge("expected_requests_per_second", "In the median.", rate_rps))
        return families

    def told(self) -> dict[str, Any]:
        """As ``/fleet/state`` says it."""
        now_s = asyncio.get_running_loop().time()
        goal, last = self._goal, self._last
        recent = [is_good for at_s, is_good in self._answers if at_s >= now_s - 60]
        return {
            "wanted": self.wanted,
            "min": goal.min_replicas,
            "max": goal.max_replicas,
            "limits": str(goal.slo),
            "target": goal.target,
            "start_s": round(self._control.start_s, 2),
            "pace": round(self._pace.factor, 3) if self._pace.is_known else None,
            "within_limits_1m": sum(recent) / len(recent) if recent else None,
            "now": None if last is None else last.reason,
            "expected": None if last is None else _told(last.expected),
            "decisions": [each.told(now_s) for each in reversed(self._records)],
        }


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _told(expected: ExpectedLoad) -> dict[str, float]:
    return {
        "requests_per_s": round(expected.p50_rps, 3),
        "burst_requests_per_s": round(expected.burst_rps, 3),
    }


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.0%}"


def _curve(engine: RoutedEngine) -> StepCurve:
    return engine.state.curve or StepCurve.of_linear(engine.state.linear)


def _is_calibrated(engine: RoutedEngine) -> bool:
    return engine.state.curve not in (None, DEFAULT_CURVE)
