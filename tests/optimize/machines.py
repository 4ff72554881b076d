"""Machines to optimize on, which are simulated otherwise than they are predicted."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp

from ridgeline.core.config import EngineConfig
from ridgeline.engine.loading import load_model
from ridgeline.executors import executor_traits
from ridgeline.optimize import (
    DEFAULT,
    PATTERNS,
    Candidate,
    CandidatePredictor,
    Found,
    Objective,
    QualityLimits,
    Task,
    Visit,
    declared_space,
)
from ridgeline.optimize.objective import Outcome, value
from ridgeline.roofline.calibration import corrected, typical
from ridgeline.roofline.catalogue import load_catalogue

_SLOWER = 100.0  # than a whole server of those processors: some requests a second
LOADED = load_model(EngineConfig())


def predictor(**settings) -> CandidatePredictor:
    """Of the embedded model on a machine of the catalogue; nothing is measured."""
    ceilings = load_catalogue().device("epyc-9654").ceilings()
    return CandidatePredictor(
        EngineConfig(**settings),
        LOADED,
        executor_traits("cpu"),
        corrected(typical(ceilings), _SLOWER),
        memory_bytes=16e9,
        kv_share=0.4,
    )


def task(
    workload="batch", *, objective=Objective.GOODPUT, budget_s=60.0, given=(), **settings
) -> Task:
    base = EngineConfig(**settings)
    pattern = PATTERNS[workload]
    return Task(
        base=base,
        space=declared_space(base, executor_traits("cpu"), slo=pattern.slo, given=given),
        workload=workload,
        pattern=pattern,
        slo=pattern.slo,
        objective=objective,
        quality=QualityLimits(),
        budget_s=budget_s,
    )


class SimulatedMachine:
    """Measures by prediction, times what is ``planted`` on a change, with noise; its clock goes on
    by what a visit takes."""

    def __init__(
        self,
        predicted: CandidatePredictor,
        *,
        planted: Mapping[tuple[str, object], float] | None = None,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._predictor, self._planted, self._noise = predicted, planted or {}, noise
        self._rng = random.Random(seed)
        self.now_s = 0.0
        self.visited: list[Candidate] = []
        self.interrupt_after: int | None = None
        self.look_s = 0.002  # between two looks at the clock

    def clock(self) -> float:
        self.now_s += self.look_s
        return self.now_s

    def slowness(self, candidate: Candidate) -> float:
        factor = 1.0
        for change in candidate.changes:
            factor *= self._planted.get(change, 1.0)
        return factor

    def outcomes(self, candidate: Candidate, arrivals: Sequence[object]) -> tuple[Outcome, ...]:
        return stretched(self._predictor.outcomes(candidate, arrivals), self.slowness(candidate))

    def visit(self, candidate, arrivals, *, seed):
        if self.interrupt_after is not None and len(self.visited) >= self.interrupt_after:
            raise KeyboardInterrupt
        self.visited.append(candidate)
        noise = exp(self._rng.gauss(0.0, self._noise))
        found = stretched(self.outcomes(candidate, arrivals), noise)
        self.now_s += max(each.done_s for each in found)
        return Visit(outcomes=found)

    def true_ratio(self, candidate: Candidate, found: Found) -> float:
        """Of the values without noise."""
        one, other = (
            value(found.task.objective, self.outcomes(each, found.arrivals), found.task.slo)
            for each in (candidate, DEFAULT)
        )
        return one / other

    def close(self) -> None:
        pass


def stretched(outcomes: Sequence[Outcome], factor: float) -> tuple[Outcome, ...]:
    """All requests ``factor`` times as long."""
    return tuple(
        replace(
            each,
            done_s=each.arrival_s + factor * (each.done_s - each.arrival_s),
            ttft_s=None if each.ttft_s is None else factor * each.ttft_s,
            tpot_s=None if each.tpot_s is None else factor * each.tpot_s,
            end_to_end_s=factor * each.end_to_end_s,
        )
        for each in outcomes
    )
