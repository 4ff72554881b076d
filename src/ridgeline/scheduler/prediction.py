"""What steps will take: linear predictors, their correction, and budgets made of them."""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise

from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.core.protocols import StepTimePredictor
from ridgeline.scheduler.sequence import Sequence

_SMOOTHING = 0.1  # weight of the newest observation in running means
_LEAST_S = 1e-9  # of a step
_OBSERVE_EVERY_S = 0.05  # of steps: a prediction takes as long as a small model's step


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPredictor:
    """Seconds linear in passes, tokens, and pairs of a token and one that it attends to.

    ``draft_share``: what the draft model takes of the target's seconds.
    """

    pass_s: float
    token_s: float
    pair_s: float = 0.0
    draft_share: float = 1.0

    def seconds(self, plan: StepPlan) -> float:
        """Predicted seconds of a whole step."""
        return sum(
            a_pass.num_steps
            * (1.0 if a_pass.role is ModelRole.TARGET else self.draft_share)
            * (
                self.pass_s
                + sum(self.segment_seconds(s.num_tokens, s.start) for s in a_pass.segments)
            )
            for a_pass in plan.passes
        )

    def segment_seconds(self, num_tokens: int, context: int) -> float:
        """What a segment of ``num_tokens`` after ``context`` computed ones adds to a step."""
        pairs = num_tokens * (context + (num_tokens + 1) / 2)
        return self.token_s * num_tokens + self.pair_s * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """Seconds of a step by how many tokens it computes, at the points ``tokens`` and linear between
    them and beyond, and of each token of context that its single tokens attend to.

    Raises:
        ValueError: it is no curve, or some step would take no time.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    context_s: float

    def __post_init__(self) -> None:
        tokens, seconds = self.tokens, self.seconds
        if not (
            len(tokens) == len(seconds) >= 2
            and tokens[0] == 1
            and all(low < high for low, high in pairwise(tokens))
            and all(0 < each < math.inf for each in seconds)
            and seconds[-2] <= seconds[-1]
            and 0 <= self.context_s < math.inf
        ):
            raise ValueError("a curve needs two steps from one token on, each of which takes time")

    @classmethod
    def of_linear(cls, linear: LinearPredictor) -> "StepCurve":
        """All that a linear predictor says."""
        one_s, two_s = (max(_LEAST_S, linear.pass_s + n * linear.token_s) for n in (1, 2))
        return cls(tokens=(1, 2), seconds=(one_s, two_s), context_s=linear.pair_s)

    def slower(self, factor: float) -> "StepCurve":
        """As if everything took ``factor`` times as long."""
        seconds = tuple(factor * each for each in self.seconds)
        return replace(self, seconds=seconds, context_s=factor * self.context_s)

    def step_s(self, num_tokens: int, context: float) -> float:
        """Seconds of a step of ``num_tokens``, of which single ones attend to ``context``."""
        at = min(max(1, bisect_right(self.tokens, num_tokens)), len(self.tokens) - 1)
        (first, last), (low_s, high_s) = self.tokens[at - 1 : at + 1], self.seconds[at - 1 : at + 1]
        slope_s = (high_s - low_s) / (last - first)
        return low_s + slope_s * (num_tokens - first) + self.context_s * context


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePredictor:
    """Seconds of plans by a `StepCurve`. ``pair_s``: of each pair of a prompt's token and one
    that was computed in a step before."""

    curve: StepCurve
    pair_s: float

    def seconds(self, plan: StepPlan) -> float:
        """Predicted seconds of a whole step."""
        total = 0.0
        for a_pass in plan.passes:
            segments = a_pass.segments
            context = sum(s.start for s in segments if s.num_tokens == 1)
            pairs = sum(s.num_tokens * s.start for s in segments if s.num_tokens > 1)
            step_s = self.curve.step_s(a_pass.num_tokens, context) + self.pair_s * pairs
            total += a_pass.num_steps * step_s
        return total

    def segment_seconds(self, num_tokens: int, context: int) -> float:
        """What a segment of ``num_tokens`` after ``context`` computed ones adds to a step."""
        if num_tokens == 1:
            return self.curve.step_s(2, context) - self.curve.step_s(1, 0)
        alone_s = self.curve.step_s(num_tokens, 0) - self.curve.step_s(1, 0)
        return alone_s + self.pair_s * num_tokens * context


# Only the proportions matter, since `CorrectedPredictor` scales them to what steps really take: a
# pass takes as long as 16 tokens, and a token as long as attending to 4,096 others.
DEFAULT_PREDICTOR = LinearPredictor(pass_s=1.6e-3, token_s=1e-4, pair_s=2.5e-8)
DEFAULT_CURVE = StepCurve.of_linear(DEFAULT_PREDICTOR)


class CorrectedPredictor:
    """A prediction, scaled by the ratio of measured to predicted seconds of the steps so far."""

    def __init__(self, predictor: StepTimePredictor) -> None:
        self._predictor = predictor
        self.is_calibrated = False  # whether a step was observed
        self._scale = 1.0
        self._unobserved_s = _OBSERVE_EVERY_S
        self._fixed_s = 0.0  # of a step, beyond what the target's segments add; before scaling
        self._step_s = 0.0
        self._output_tokens = 256.0

    def observe(self, plan: StepPlan, measured_s: float) -> None:
        """Learn from a step that was executed; not from each, what it should have taken."""
        if measured_s <= 0:
            return
        target = plan.passes[-1]
        step_s = measured_s / target.num_steps
        self._step_s = _mean(self._step_s, step_s) if self._step_s else step_s
        self._unobserved_s += measured_s
        if self._unobserved_s < _OBSERVE_EVERY_S:
            return
        predicted = self._predictor.seconds(plan)
        if predicted <= 0:
            return
        self._unobserved_s = 0.0
        parts = sum(
            self._predictor.segment_seconds(segment.num_tokens, segment.start)
            for segment in target.segments
        )
        self._fixed_s = max(0.0, predicted / target.num_steps - parts)
        ratio = measured_s / predicted
        self._scale = _mean(self._scale, ratio) if self.is_calibrated else ratio
        self.is_calibrated = True

    def observe_output(self, num_tokens: int) -> None:
        """Learn from the length of an output that has ended."""
        self._output_tokens = _mean(self._output_tokens, num_tokens)

    @property
    def fixed_s(self) -> float:
        """Predicted seconds of a step before anything is in it."""
        return self._fixed_s * self._scale

    def segment_s(self, num_tokens: int, context: int) -> float:
        """Predicted seconds that a segment adds."""
        return self._predictor.segment_seconds(num_tokens, context) * self._scale

    def remaining_s(self, sequence: Sequence) -> float:
        """Predicted seconds until the sequence is finished, if it ran from now on; 0 if unknown.

        It is expected to be as long as outputs have been, within its own limit.
        """
        if not self.is_calibrated:
            return 0.0
        params = sequence.request.params
        tokens = min(params.max_tokens or math.inf, self._output_tokens)
        steps = max(0.0, tokens - sequence.num_output_tokens - 1)
        prompt_s = self.segment_s(sequence.num_to_compute, sequence.kv.num_computed)
        return prompt_s + steps * self._step_s


class StepBudget:
    """Tokens, and perhaps seconds, that are left in the step that is being planned."""

    __slots__ = ("_predictor", "seconds", "tokens")

    def __init__(
        self, tokens: int, *, seconds: float | None, predictor: CorrectedPredictor
    ) -> None:
        self.tokens = tokens
        self._predictor = predictor
        self.seconds = None if seconds is None else seconds - predictor.fixed_s

    def unbounded(self) -> None:
        """Nobody is made to wait by this step: seconds do not matter."""
        self.seconds = None

    def grant(self, wanted: int, context: int) -> int:
        """How many of ``wanted`` tokens after ``context`` may still be computed."""
        count = min(wanted, self.tokens)
        seconds = self.seconds
        if seconds is None:
            return count
        return bisect_right(
            range(1, count + 1), seconds, key=lambda n: self._predictor.segment_s(n, context)
        )

    def spend_seconds(self, num_tokens: int, context: int) -> None:
        """Those of so many tokens after ``context``, where seconds are limited."""
        assert self.seconds is not None
        self.seconds -= self._predictor.segment_s(num_tokens, context)


def _mean(mean: float, value: float) -> float:
    return mean + _SMOOTHING * (value - mean)
