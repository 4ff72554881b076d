"""Predicted seconds of steps, with an interval, for the scheduler and the planner."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import ceil, exp, log

from ridgeline.core.op_facts import OpKind
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.core.weight_uses import experts_of
from ridgeline.roofline.batch import NO_ADAPTERS, BatchShape, batches_of, make_batch
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
    pass_terms,
)
from ridgeline.roofline.fitting import coefficient, overlap_seconds, predict, weighted
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.price import Phase, phase_of

_LENGTH_KNOTS = (1, 8, 32, 128, 512, 2048)  # of segments that are priced
_NEAR_CONTEXT = 4096
_UNKNOWN = 10.0  # times the lower end
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


def is_known(low: float, high: float) -> bool:
    """Whether an interval says something: its ends differ by less than a factor of ten."""
    return high < _UNKNOWN * low


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
    """Predicts steps of some models on one calibrated machine. A `core.StepTimePredictor`."""

    def __init__(self, models: Mapping[ModelRole, PricedModel], calibration: Calibration) -> None:
        self.models = models
        self.calibration = calibration
        self.correction = OnlineCorrection()

    def seconds(self, plan: StepPlan, adapters: Mapping[int, int] = NO_ADAPTERS) -> float:
        """Predicted seconds in the executor by the calibration alone; ``adapters`` are those of
        slots that have one.

        Not corrected by the steps observed so far: who goes by a price scales it to them.
        """
        return sum(
            self.batch_seconds(batch, a_pass.role)
            for a_pass in plan.passes
            for batch in batches_of(a_pass, adapters)
        )

    def interval(self, seconds: float, phase: str) -> Prediction:
        form = self.models[ModelRole.TARGET].main_format
        spread = self.calibration.spread(phase, form)
        return Prediction(seconds=seconds, low_s=seconds * spread.low, high_s=seconds * spread.high)

    def batch_seconds(self, batch: BatchShape, role: ModelRole = ModelRole.TARGET) -> float:
        """Predicted seconds of one forward pass."""
        seconds = predict(self.calibration.coefficients, self.terms(batch, role))
        return self.calibration.level * seconds

    def terms(self, batch: BatchShape, role: ModelRole = ModelRole.TARGET) -> Terms:
        return pass_terms(self.models[role], batch, self.calibration.ceilings)

    def segment_seconds(self, num_tokens: int, context: int) -> float:
        """What a segment of ``num_tokens`` after ``context`` computed ones adds to a step.

        Interpolated between segments that were priced once, since schedulers ask often.
        """
        seconds, longest = 0.0, _LENGTH_KNOTS[-1]
        while num_tokens >= longest:
            seconds += self._added_s(-1, context)
            context += longest
            num_tokens -= longest
        if num_tokens == 0:
            return seconds
        at = bisect_right(_LENGTH_KNOTS, num_tokens)
        low, high = _LENGTH_KNOTS[at - 1], _LENGTH_KNOTS[at]
        below, above = self._added_s(at - 1, context), self._added_s(at, context)
        return seconds + below + (num_tokens - low) / (high - low) * (above - below)

    def _added_s(self, length: int, context: int) -> float:
        """What the ``length``-th of `_LENGTH_KNOTS` tokens add after ``context``, linear between
        the contexts that were priced and beyond the last."""
        knots, seconds = self._context_knots, self._added[length]
        at = min(max(bisect_right(knots, context), 1), len(knots) - 1)
        slope = (seconds[at] - seconds[at - 1]) / (knots[at] - knots[at - 1])
        return seconds[at - 1] + slope * (context - knots[at - 1])

    @cached_property
    def _context_knots(self) -> tuple[int, ...]:
        """Contexts that are priced. What attention adds grows with them, up to the window."""
        model = self.models[ModelRole.TARGET]
        most = max(2, model.spec.max_position)
        windows = [op.window for op, _ in model.attention_ops]
        inner = {each for each in (*windows, _NEAR_CONTEXT) if each and each < most}
        return tuple(sorted({0, most} | inner))

    @cached_property
    def _added(self) -> tuple[tuple[float, ...], ...]:
        """Seconds that a segment of each of `_LENGTH_KNOTS` adds, after each context."""
        company = [(0, 1)] * _company(self.models[ModelRole.TARGET])
        before = self.batch_seconds(make_batch(company))
        return tuple(
            tuple(
                max(0.0, self.batch_seconds(make_batch([*company, (c, c + length)])) - before)
                for c in self._context_knots
            )
            for length in _LENGTH_KNOTS
        )

    def plan_parts(
        self, plan: StepPlan, adapters: Mapping[int, int] = NO_ADAPTERS
    ) -> dict[Bound, float]:
        """`seconds` of a plan by what bounds them."""
        seconds = dict.fromkeys(Bound, 0.0)
        for a_pass in plan.passes:
            for batch in batches_of(a_pass, adapters):
                for bound, part in self.parts(batch, a_pass.role).items():
                    seconds[bound] += part
        return seconds

    def parts(self, batch: BatchShape, role: ModelRole = ModelRole.TARGET) -> dict[Bound, float]:
        """Predicted seconds of a forward pass by what bounds them."""
        terms, coefficients = self.terms(batch, role), self.calibration.coefficients
        seconds = dict.fromkeys(Bound, 0.0)
        for name, value in terms.alone.items():
            seconds[_BOUNDS.get(name, Bound.COMPUTE)] += coefficient(coefficients, name) * value
        for overlap in terms.overlaps:
            memory_s = weighted(coefficients, overlap.memory)
            arithmetic_s = weighted(coefficients, overlap.arithmetic)
            bound = Bound.MEMORY if memory_s >= arithmetic_s else Bound.COMPUTE
            seconds[bound] += overlap_seconds(coefficients, overlap)
        return {bound: self.calibration.level * part for bound, part in seconds.items()}

    def bound(self, batch: BatchShape) -> Bound:
        """What most of a forward pass's predicted seconds go to."""
        parts = self.parts(batch)
        return max(parts, key=lambda each: parts[each])


def step_phase(plan: StepPlan) -> str:
    """``prefill`` if any segment of the target is, else ``decode``."""
    segments = (s for a in plan.passes if a.role is ModelRole.TARGET for s in a.segments)
    is_prefill = any(phase_of(segment) is Phase.PREFILL for segment in segments)
    return Phase.PREFILL.value if is_prefill else Phase.DECODE.value


def _company(model: PricedModel) -> int:
    """Sequences of a step that another one joins: so many that they have touched nearly all
    experts (98 %), since one more then adds the reading of hardly any."""
    experts = [experts_of(op) for op, _ in model.token_ops if op.facts.kind is OpKind.EXPERTS]
    return max((ceil(4 * count / met) for count, met in experts), default=1)
