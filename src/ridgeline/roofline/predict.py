"""Predicted seconds of steps, with an interval: the price of the scheduler and the planner."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import exp, log

from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.roofline.batch import NO_ADAPTERS, Batch, batches_of, decode_batch, prefill_batch
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.features import (
    LINK,
    OP,
    OTHER,
    ROW,
    SEGMENT,
    SEQUENCE,
    STEP,
    Terms,
    add_terms,
    pass_terms,
)
from ridgeline.roofline.fitting import coefficient, overlap_seconds, predict, weighted
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.price import Phase, phase_of

_MARGINAL_KNOTS = (1, 8, 32, 128, 512, 2048)
_ADAPTATION = 0.05  # weight of the newest step in the correction


class Bound(StrEnum):
    """What most of a step's predicted seconds go to."""

    MEMORY = "memory"
    COMPUTE = "compute"
    OVERHEAD = "overhead"
    COMMUNICATION = "communication"


_BOUNDS = dict.fromkeys((STEP, OP, SEGMENT, SEQUENCE, ROW), Bound.OVERHEAD) | {
    OTHER: Bound.MEMORY,
    LINK: Bound.COMMUNICATION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds, and the interval that holds the measured ones 80 times of 100."""

    seconds: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marginal:
    """Seconds that a segment of some length adds: at the start, and more for each token before."""

    first_s: float
    context_s: float

    def seconds(self, context: int) -> float:
        return self.first_s + self.context_s * context


class OnlineCorrection:
    """The running ratio of measured to predicted seconds, one for each phase."""

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def factor(self, phase: str) -> float:
        return exp(self._logs.get(phase, 0.0))

    def observe(self, phase: str, predicted_s: float, measured_s: float) -> None:
        """Learn from a step; one outlier moves the ratio by at most 5 % of fourfold."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        error = max(-log(4.0), min(log(4.0), log(measured_s / predicted_s)))
        count = self._counts.get(phase, 0) + 1
        weight = max(_ADAPTATION, 1 / count)  # the plain mean at first
        mean = self._logs.get(phase, 0.0)
        self._logs[phase] = mean + weight * (error - mean)
        self._counts[phase] = count


class StepPredictor:
    """Prices steps of some models on one calibrated machine. Satisfies `core.StepPrice`."""

    def __init__(self, models: Mapping[ModelRole, PricedModel], calibration: Calibration) -> None:
        self.models = models
        self.calibration = calibration
        self.correction = OnlineCorrection()

    def seconds(self, plan: StepPlan) -> float:
        """Predicted seconds in the executor, corrected by the steps observed so far."""
        return self.raw_seconds(plan) * self.correction.factor(step_phase(plan))

    def raw_seconds(self, plan: StepPlan, adapters: Mapping[int, int] = NO_ADAPTERS) -> float:
        """Predicted seconds by the calibration alone; ``adapters`` are those of slots that have
        one."""
        total = 0.0
        for a_pass in plan.passes:
            for batch in batches_of(a_pass, adapters):
                total += self.batch_seconds(batch, a_pass.role)
        return total

    def predict(self, plan: StepPlan) -> Prediction:
        """Seconds with their interval."""
        return self.interval(self.seconds(plan), step_phase(plan))

    def interval(self, seconds: float, phase: str) -> Prediction:
        spread = self.calibration.spreads[phase]
        return Prediction(seconds=seconds, low_s=seconds * spread.low, high_s=seconds * spread.high)

    def batch_seconds(self, batch: Batch, role: ModelRole = ModelRole.TARGET) -> float:
        """Predicted seconds of one forward pass."""
        return predict(self.calibration.coefficients, self.terms(batch, role))

    def terms(self, batch: Batch, role: ModelRole = ModelRole.TARGET) -> Terms:
        return pass_terms(self.models[role], batch, self.calibration.ceilings)

    def segment_seconds(self, num_tokens: int, context: int) -> float:
        """What a segment of ``num_tokens`` after ``context`` computed ones adds to a step.

        Interpolated between segments that were priced once, since schedulers ask often.
        """
        seconds = 0.0
        while num_tokens >= _MARGINAL_KNOTS[-1]:
            seconds += self._marginal[-1].seconds(context)
            context += _MARGINAL_KNOTS[-1]
            num_tokens -= _MARGINAL_KNOTS[-1]
        if num_tokens == 0:
            return seconds
        at = bisect_right(_MARGINAL_KNOTS, num_tokens)
        low, high = _MARGINAL_KNOTS[at - 1], _MARGINAL_KNOTS[at]
        below, above = (self._marginal[i].seconds(context) for i in (at - 1, at))
        return seconds + below + (num_tokens - low) / (high - low) * (above - below)

    @cached_property
    def _marginal(self) -> list[_Marginal]:
        """What a segment of each of `_MARGINAL_KNOTS` tokens adds."""
        alone = self.batch_seconds(decode_batch(1, 1))
        fixed = max(0.0, 2 * alone - self.batch_seconds(decode_batch(2, 1)))
        far = min(4096, self.models[ModelRole.TARGET].spec.max_position)
        found = []
        for count in _MARGINAL_KNOTS:
            first_s = self.batch_seconds(prefill_batch(count))
            later_s = self.batch_seconds(prefill_batch(count, start=far))
            slope = max(0.0, later_s - first_s) / far
            found.append(_Marginal(first_s=first_s - fixed, context_s=slope))
        return found

    def parts(self, batch: Batch) -> dict[Bound, float]:
        """Predicted seconds of a forward pass by what bounds them."""
        terms, coefficients = self.terms(batch), self.calibration.coefficients
        seconds = dict.fromkeys(Bound, 0.0)
        for name, value in terms.alone.items():
            seconds[_BOUNDS.get(name, Bound.COMPUTE)] += coefficient(coefficients, name) * value
        for overlap in terms.overlaps:
            memory_s = weighted(coefficients, overlap.memory)
            arithmetic_s = weighted(coefficients, overlap.arithmetic)
            bound = Bound.MEMORY if memory_s >= arithmetic_s else Bound.COMPUTE
            seconds[bound] += overlap_seconds(coefficients, overlap)
        return seconds

    def bound(self, batch: Batch) -> Bound:
        """What most of a forward pass's predicted seconds go to."""
        parts = self.parts(batch)
        return max(parts, key=lambda each: parts[each])


def step_phase(plan: StepPlan) -> str:
    """``prefill`` if any segment of the target is, else ``decode``."""
    segments = (s for a in plan.passes if a.role is ModelRole.TARGET for s in a.segments)
    is_prefill = any(phase_of(segment) is Phase.PREFILL for segment in segments)
    return Phase.PREFILL.value if is_prefill else Phase.DECODE.value


def plan_terms(predictor: StepPredictor, plan: StepPlan) -> Terms:
    """The terms of a whole step, for calibrating on it."""
    return add_terms(
        [predictor.terms(batch, a.role) for a in plan.passes for batch in batches_of(a)]
    )
