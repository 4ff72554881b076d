"""Autoscalers compared on a day of traffic: the scheduler of an engine in each replica.

    python -m benchmarks.autoscaling [--hours 1] [--peak 9] [--start-s 30] [--bursts 6]

A day compressed into an hour: a sine from a fifth of the peak to the peak, and bursts of five times
the rate. Ours decides by simulation every 5 s; rules as Kubernetes' HorizontalPodAutoscaler has
them are tried over a grid of metrics, targets and windows. Rules hear of their metric at once.
"""

import argparse
import json
import random
from collections import deque
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from math import ceil, inf, pi, sin
from statistics import fmean
from time import perf_counter

from ridgeline.core.config import EngineConfig
from ridgeline.fleet.forecast import INTERVAL_S, ArrivalForecast
from ridgeline.fleet.light_simulation import ReplicaLoad
from ridgeline.fleet.policies import ByPredictedSeconds
from ridgeline.fleet.scaling import ScalingGoal, ScalingPolicy
from ridgeline.fleet.simulation import SimulatedFleet, SimulatedMachine, SimulatedReplica
from ridgeline.models import PRESETS, describe, lower
from ridgeline.planning import catalogue_machine
from ridgeline.planning.workload import Arrival
from ridgeline.roofline import PricedModel
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.slo import Slo

SLO = Slo(ttft_s=1.0, tpot_s=0.08)
MOST = 12
_KV_BYTES = 20e9
_BURST = 5  # times the rate


def machine_of(device: str) -> SimulatedMachine:
    """Llama 3.1 8B in bf16 on a device of the catalogue."""
    spec = describe(dict(PRESETS["llama-3.1-8b"])).spec
    machine = catalogue_machine(load_catalogue(), device)
    model = machine.run(PricedModel(spec=spec, ops=lower(spec)))
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=16384)
    return SimulatedMachine.of_model(model, machine.calibration, config, kv_pool_bytes=_KV_BYTES)


def a_day(
    *, seconds: float, peak_rps: float, num_bursts: int, burst_s: float, seed: int, flat: bool
) -> list[Arrival]:
    """A Poisson process, thinned to the rate of the time of day (Lewis and Shedler 1979)."""
    rng = random.Random(seed)
    bursts = sorted(rng.uniform(0.05, 0.95) * seconds for _ in range(num_bursts))

    def rate(now_s: float) -> float:
        if flat:
            return peak_rps
        usual = peak_rps * (0.6 - 0.4 * sin(2 * pi * (now_s / seconds + 0.25)))
        is_burst = any(begin <= now_s < begin + burst_s for begin in bursts)
        return usual * (_BURST if is_burst else 1)

    most = peak_rps * (1 if flat else _BURST)
    found, now_s = list[Arrival](), 0.0
    while (now_s := now_s + rng.expovariate(most)) < seconds:
        if rng.random() * most < rate(now_s):
            prompt = max(64, min(8000, round(rng.lognormvariate(7.3, 0.6))))
            output = max(8, min(300, round(rng.lognormvariate(4.2, 0.6))))
            found.append(Arrival(arrival_s=now_s, prompt_tokens=prompt, output_tokens=output))
    return found


class ScaledFleet:
    """Simulated replicas that start, take requests, drain; and what they cost."""

    def __init__(self, machine: SimulatedMachine, *, start_s: float, count: int) -> None:
        self.machine, self.start_s = machine, start_s
        self.fleet = SimulatedFleet(machine, ByPredictedSeconds())
        self.up: list[SimulatedReplica] = [self.fleet.add_replica() for _ in range(count)]
        self.starting: list[float] = []  # when each will be there
        self._begun = dict.fromkeys(self.up, 0.0)
        self._left: dict[SimulatedReplica, float] = {}
        self._given_up_s = 0.0
        self.changes: list[tuple[float, int]] = []

    @property
    def count(self) -> int:
        return len(self.up) + len(self.starting)

    def advance(self, now_s: float) -> None:
        """Those that have started take requests."""
        while self.starting and self.starting[0] <= now_s:
            self.fleet.run_until(at_s := self.starting.pop(0))
            self.up.append(replica := self.fleet.add_replica(at_s))
            self._begun[replica] = at_s - self.start_s

    def scale(self, now_s: float, wanted: int) -> None:
        """Start some, or let those with the least to do leave."""
        if wanted != self.count:
            self.changes.append((now_s, wanted - self.count))
        while self.count < wanted:
            self.starting.append(now_s + self.start_s)
        while self.count > wanted and self.starting:
            self._given_up_s += self.start_s - (self.starting.pop() - now_s)
        while self.count > wanted:
            replica = min(reversed(self.up), key=lambda each: each.num_open)
            self.up.remove(replica)
            self.fleet.retire(replica)
            self._left[replica] = now_s

    def machine_seconds(self, end_s: float) -> float:
        """From the start of each until it has drained."""
        total = self._given_up_s
        for replica, begin_s in self._begun.items():
            left_s = self._left.get(replica, end_s)
            last_s = max((each.done_s for each in replica.answers), default=left_s)
            total += max(left_s, last_s if replica in self._left else 0.0) - begin_s
        return total + sum(end_s - (each - self.start_s) for each in self.starting)


class Ours:
    """The policy as a router drives it."""

    def __init__(self, machine: SimulatedMachine, start_s: float) -> None:
        self._machine = machine
        self._policy = ScalingPolicy(ScalingGoal(slo=SLO, max_replicas=MOST), start_s=start_s)
        self.forecast = ArrivalForecast(0.0, ahead_s=self._policy.ahead_s)
        self._heard: dict[SimulatedReplica, int] = {}
        self.seconds = list[float]()

    def note(self, arrival: Arrival) -> None:
        self.forecast.note(arrival.arrival_s, arrival.prompt_tokens, 128)

    def __call__(self, now_s: float, scaled: ScaledFleet) -> int:
        for replica in scaled.up:
            for answer in replica.answers[self._heard.get(replica, 0) :]:
                self.forecast.note_output(answer.arrival.output_tokens)
            self._heard[replica] = len(replica.answers)
        settings, linear = self._machine.settings, self._machine.linear
        kv_tokens = min(settings.num_blocks, default=0) * settings.block_tokens
        loads = [
            ReplicaLoad(
                load=each.choice((), linear).load, curve=self._machine.curve, kv_tokens=kv_tokens
            )
            for each in scaled.up
        ]
        loads += [loads[0].as_new(at_s - now_s) for at_s in scaled.starting]
        before_s = perf_counter()
        decision = self._policy.decide(now_s, loads, self.forecast.expected(now_s))
        self.seconds.append(perf_counter() - before_s)
        return decision.wanted


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Of a rule: the metric's value that each replica is to have, and the windows, in seconds, over
    which the lowest (up) and the highest (down) of what was wanted is taken."""

    metric: str
    target: float
    up_s: float
    down_s: float

    def __str__(self) -> str:
        return f"{self.metric} {self.target:g}, up {self.up_s:g} s, down {self.down_s:g} s"


class Rule:
    """HorizontalPodAutoscaler (autoscaling/v2) with an average value: ceil(metric / target), not
    within a tenth of the target, every 15 s; at most twice as many, or 4 more."""

    def __init__(self, targets: Targets) -> None:
        self._targets, self._next_s = targets, 0.0
        self._wanted = list[tuple[float, int]]()
        self.arrivals = deque[float]()

    def note(self, arrival: Arrival) -> None:
        self.arrivals.append(arrival.arrival_s)

    def __call__(self, now_s: float, scaled: ScaledFleet) -> int:
        count, targets = scaled.count, self._targets
        if now_s < self._next_s:
            return count
        self._next_s = now_s + 15.0
        value = self._value(now_s, scaled) / targets.target
        is_near = abs(value / count - 1) <= 0.1
        wanted = count if is_near else max(1, min(MOST, ceil(value)))
        self._wanted.append((now_s, wanted))
        lowest = min(n for at_s, n in self._wanted if at_s >= now_s - targets.up_s)
        highest = max(n for at_s, n in self._wanted if at_s >= now_s - targets.down_s)
        if lowest > count:
            return min(lowest, count + max(4, count))
        return min(count, highest)

    def _value(self, now_s: float, scaled: ScaledFleet) -> float:
        metric = self._targets.metric
        if metric == "rate":
            while self.arrivals and self.arrivals[0] < now_s - 30:
                self.arrivals.popleft()
            return len(self.arrivals) / 30
        if metric == "requests":
            return sum(each.num_open for each in scaled.up)
        price = scaled.machine.linear
        return sum(each.choice((), price).load.num_pending for each in scaled.up)


GRID = [
    Targets(metric=metric, target=target, up_s=up_s, down_s=down_s)
    for metric, targets in {
        "rate": (1.0, 1.4, 1.8, 2.2, 2.6),
        "requests": (2.0, 3.0, 4.0, 6.0, 8.0),
        "waiting": (0.2, 0.4, 0.8, 1.6),
    }.items()
    for target, up_s, down_s in product(targets, (0, 30), (60, 300))
]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of a day: the share of requests within the limits, and what it took. ``reversals``: when the
    fleet changed in the other direction than before."""

    attainment: float
    machine_s: float
    num_changes: int
    reversals: list[float]
    most: int


def run(
    machine: SimulatedMachine, arrivals: list[Arrival], scaler: Ours | Rule, *, start_s: float
) -> Outcome:
    """A day; requests that arrive in it are waited for."""
    scaled = ScaledFleet(machine, start_s=start_s, count=1)
    waiting, end_s = deque(arrivals), arrivals[-1].arrival_s
    now_s, most = 0.0, 1
    while now_s < end_s:
        now_s += INTERVAL_S
        while waiting and waiting[0].arrival_s < now_s:
            arrival = waiting.popleft()
            scaled.advance(arrival.arrival_s)
            scaled.fleet.send(arrival)
            scaler.note(arrival)
        scaled.advance(now_s)
        scaled.fleet.run_until(now_s)
        scaled.scale(now_s, scaler(now_s, scaled))
        most = max(most, scaled.count)
    scaled.fleet.run_until(inf)
    traffic = scaled.fleet.outcome(arrivals).traffic
    changes = scaled.changes
    return Outcome(
        attainment=traffic.attainment(SLO),
        machine_s=scaled.machine_seconds(end_s),
        num_changes=len(changes),
        reversals=[after[0] for before, after in pairwise(changes) if before[1] * after[1] < 0],
        most=most,
    )


def _show(name: str, outcome: Outcome, seconds: float) -> None:
    print(f"{name:42} within {outcome.attainment:6.2%}  {outcome.machine_s / 3600:6.2f} h "
          f"of machines, {outcome.num_changes:3} changes, {len(outcome.reversals):3} turns, "
          f"most {outcome.most}"
          f"  ({seconds:.0f} s)", flush=True)  # fmt: skip


def main() -> None:
    """Print each outcome, and one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--peak", type=float, default=9.0)
    parser.add_argument("--start-s", type=float, default=30.0)
    parser.add_argument("--bursts", type=int, default=6)
    parser.add_argument("--burst-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="l40s")
    parser.add_argument("--flat", action="store_true", help="constant load, of the peak")
    parser.add_argument("--rules", default="", help="only those whose name has this")
    parser.add_argument("--ours", action="store_true", help="and no rules")
    arguments = parser.parse_args()
    machine, start_s = machine_of(arguments.device), arguments.start_s
    arrivals = a_day(
        seconds=3600 * arguments.hours, peak_rps=arguments.peak, num_bursts=arguments.bursts,
        burst_s=arguments.burst_s, seed=arguments.seed, flat=arguments.flat,
    )  # fmt: skip
    print(f"{len(arrivals)} requests", flush=True)
    scaler = Ours(machine, start_s)
    begin_s = perf_counter()
    ours = run(machine, arrivals, scaler, start_s=start_s)
    _show("by simulation", ours, perf_counter() - begin_s)
    print(f"a decision: {fmean(scaler.seconds):.3f} s, at the most {max(scaler.seconds):.3f} s")
    if arguments.flat:
        print("turns at", [round(each) for each in ours.reversals])
    found = {}
    for targets in () if arguments.ours else GRID:
        if arguments.rules not in str(targets):
            continue
        begin_s = perf_counter()
        found[targets] = outcome = run(machine, arrivals, Rule(targets), start_s=start_s)
        _show(str(targets), outcome, perf_counter() - begin_s)
    if found:
        as_good = [each for each in found if found[each].attainment >= ours.attainment]
        best = max(found, key=lambda each: found[each].attainment)
        cheapest = min(as_good, key=lambda each: found[each].machine_s, default=None)
        for name, targets in {"best": best, "cheapest as good": cheapest}.items():
            if targets is not None:
                _show(f"{name}: {targets}", found[targets], 0.0)
                print(f"ours takes {ours.machine_s / found[targets].machine_s:.3f} of it")
    print(json.dumps({"ours": asdict(ours), **{str(t): asdict(o) for t, o in found.items()}}))


if __name__ == "__main__":
    main()
