"""How many tokens to draft for each sequence: the most expected tokens per predicted second."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ridgeline.core.plan import ModelRole, Pass, StepPlan
from ridgeline.core.plan_maker import PlanMaker
from ridgeline.core.protocols import StepTimePredictor

PLAIN_STEPS = 8  # are timed together: of steps planned ahead, single ends may be seen late
PLAIN_EVERY = 64  # after which they are timed anew: a prediction takes as long as a short step
_WEIGHT = 0.25  # of the latest value in the mean
_MOST_OFF = math.log(4.0)  # a step that is further off than that from the mean was interrupted
_MOST_KNOWN = 2048  # seconds of passes that are remembered
_KEPT_STEPS = 512  # after which a kind of step that was not seen again is tried again


class Choices(NamedTuple):
    """The best lengths under each of C conditions; ``rates_C`` in tokens per second."""

    rates_C: npt.NDArray[np.float64]
    counts_C: npt.NDArray[np.int64]
    order_CT: npt.NDArray[np.int64]
    shape: tuple[int, int]

    def lengths(self, condition: int) -> npt.NDArray[np.int64]:
        """How many tokens are drafted for each sequence."""
        num_sequences, max_tokens = self.shape
        rows = self.order_CT[condition, : self.counts_C[condition]] // max_tokens
        return np.bincount(rows, minlength=num_sequences)


def choose_lengths(
    gains_CNK: npt.NDArray[np.float64],
    verify_seconds: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
    draft_seconds_C: npt.ArrayLike,
) -> Choices:
    """The lengths with the best ratio of expected tokens to seconds, under each condition.

    ``gains_CNK[c, i, j]``: expected tokens that the draft's position j adds for sequence i; falls
    along j, since a position counts only if those before it are accepted. Positions are taken in
    order of their gain over all sequences, so every prefix of that order is a set of chains, and no
    other set of as many positions gains more. ``verify_seconds`` maps the step's tokens to seconds;
    drafts take ``draft_seconds_C`` more.
    """
    num_conditions, num_sequences, max_tokens = gains_CNK.shape
    flat_CT = gains_CNK.reshape(num_conditions, -1)
    order_CT = np.argsort(-flat_CT, axis=1, kind="stable")
    sorted_CT = np.take_along_axis(flat_CT, order_CT, axis=1)
    expected_CT = num_sequences + np.cumsum(sorted_CT, axis=1)
    seconds_T = verify_seconds(num_sequences + np.arange(flat_CT.shape[1] + 1.0))
    rates_CT = expected_CT / (seconds_T[1:] + np.reshape(draft_seconds_C, (-1, 1)))
    rates_CT[sorted_CT == 0.0] = 0.0  # no draft
    best_C = rates_CT.argmax(axis=1)
    drafting_C = rates_CT[np.arange(num_conditions), best_C]
    nothing = num_sequences / seconds_T[0]
    return Choices(
        rates_C=np.maximum(drafting_C, nothing),
        counts_C=np.where(drafting_C > nothing, best_C + 1, 0),
        order_CT=order_CT,
        shape=(num_sequences, max_tokens),
    )


@dataclass(slots=True)
class _Run:
    """Steps without drafts that do not make a mean yet."""

    num_steps: int = 0
    measured_s: float = 0.0
    predicted_s: float = 0.0


@dataclass(slots=True)
class _Mean:
    """A running mean, and the last step that went into it."""

    value: float
    step: int

    def take(self, value: float, step: int, most_off: float) -> None:
        """Add a value; of one that is far off, since something interrupted it, only so much."""
        off = max(-most_off, min(most_off, value - self.value))
        self.value, self.step = self.value + _WEIGHT * off, step


class StepCosts:
    """Seconds of verification and of draft passes, predicted of plans as they would be.

    What steps of each kind really took corrects these, which know the model's passes and not
    what the host does between them.
    """

    def __init__(self, predictor: StepTimePredictor, *, max_tokens: int) -> None:
        self._plans = PlanMaker()
        self._predictor = predictor
        self._max_tokens = max_tokens
        self._known: dict[tuple[int, int, int, ModelRole], float] = {}
        # By the number of sequences as a power of two; of steps with drafts by draft passes, too.
        self._runs: dict[int, _Run] = {}
        self._plain: dict[int, _Mean] = {}  # logarithms of measured over predicted seconds
        self._excess: dict[tuple[int, int], _Mean] = {}  # seconds for each pass
        self._num_steps = 0

    def of(
        self, num_sequences: int, mean_length: float
    ) -> tuple[Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]], float]:
        """Seconds by tokens of a target pass, and of one step of the draft model.

        Asked anew when the batch or, by an eighth, the context has changed.
        """
        widths = range(1, self._max_tokens + 2)
        seconds = [self._seconds(num_sequences, mean_length, width) for width in widths]
        tokens = [num_sequences * width for width in widths]
        draft_s = self._seconds(num_sequences, mean_length, 1, ModelRole.DRAFT)
        return lambda wanted: np.interp(wanted, tokens, seconds), draft_s

    def observe(self, plan: StepPlan, seconds: float, *, is_plain: bool) -> bool:
        """Learn from a step that decoded only, if it had drafts or ``is_plain``; of the latter not
        from each. Returns whether it decoded only."""
        target = plan.passes[-1]
        if target.role is not ModelRole.TARGET or not _decodes(target):
            return False
        if seconds > 0:
            self._num_steps += target.num_steps
            size = len(target.segments).bit_length()
            plain = self._plain.get(size)
            if not is_plain or plain is None or self._age(plain) >= PLAIN_EVERY:
                self._learn(plan, size, seconds, is_plain=is_plain)
        return True

    def _learn(self, plan: StepPlan, size: int, seconds: float, *, is_plain: bool) -> None:
        *drafts, target = plan.passes
        predicted = sum(map(self._seconds_of, plan.passes))
        if is_plain:
            self._observe_plain(size, target.num_steps, seconds, predicted)
        elif size in self._plain and any(segment.num_drafts for segment in target.segments):
            chain = max((each.num_steps for each in drafts), default=0)
            least, num_passes = -0.5 * predicted, chain + 1
            excess = max(least, seconds / self.slow_down(len(target.segments)) - predicted)
            key, each = (size, chain), excess / num_passes
            if self._is_recent(key):
                known = self._excess[key]
                known.take(each, self._num_steps, max(predicted / num_passes, abs(known.value)))
            else:
                self._excess[key] = _Mean(each, self._num_steps)

    def _observe_plain(self, size: int, num_steps: int, seconds: float, predicted: float) -> None:
        run = self._runs.setdefault(size, _Run())
        run.num_steps += num_steps
        run.measured_s += seconds
        run.predicted_s += predicted
        if run.num_steps >= PLAIN_STEPS:
            del self._runs[size]
            log = math.log(run.measured_s / run.predicted_s)
            plain = self._plain.setdefault(size, _Mean(log, self._num_steps))
            plain.take(log, self._num_steps, _MOST_OFF)

    def knows(self, num_sequences: int) -> bool:
        """Whether it was seen lately what steps without drafts take."""
        plain = self._plain.get(num_sequences.bit_length())
        return plain is not None and self._age(plain) <= _KEPT_STEPS

    def knows_plain(self, target: Pass) -> bool:
        """Whether it was ever seen what a decode step of so many sequences takes without drafts."""
        return len(target.segments).bit_length() in self._plain

    def plain_s(self, target: Pass) -> float:
        """Seconds of a decode step of the same sequences without drafts."""
        count = len(target.segments)
        mean_length = sum(segment.start for segment in target.segments) / count
        return self._seconds(count, mean_length, 1) * self.slow_down(count)

    def slow_down(self, num_sequences: int) -> float:
        """Measured over predicted seconds of steps without drafts."""
        plain = self._plain.get(num_sequences.bit_length())
        return math.exp(plain.value) if plain is not None else 1.0

    def excess_s(self, num_sequences: int) -> list[float]:
        """What steps with drafts take beyond what is predicted, by draft passes from none on.

        In predicted seconds. A chain that was not seen lately is taken to be like
        the nearest one that was, pass by pass, and not to take less than predicted.
        """
        size = num_sequences.bit_length()
        lately = [
            chain for (of, chain) in self._excess if of == size and self._is_recent((of, chain))
        ]
        if not lately:
            return [0.0] * (self._max_tokens + 1)
        nearest = [
            min(lately, key=lambda known: abs(known - chain))
            for chain in range(self._max_tokens + 1)
        ]
        each_s = [self._excess[size, known].value for known in nearest]
        return [
            (chain + 1) * (each if known == chain else max(0.0, each))
            for chain, (known, each) in enumerate(zip(nearest, each_s, strict=True))
        ]

    def _is_recent(self, key: tuple[int, int]) -> bool:
        known = self._excess.get(key)
        return known is not None and self._age(known) <= _KEPT_STEPS

    def _age(self, mean: _Mean) -> int:
        return self._num_steps - mean.step

    def _seconds_of(self, a_pass: Pass) -> float:
        """Seconds as `of` counts them; its first step may have several tokens of each sequence, and
        those that deepen a tree have."""
        count = len(a_pass.segments)
        mean_length = sum(segment.start for segment in a_pass.segments) / count

        def width_s(width: int) -> float:
            return self._seconds(count, mean_length, width, a_pass.role)

        width, part = divmod(a_pass.num_tokens / count, 1.0)
        first_s, later_s, num_later = width_s(int(width)), 0.0, a_pass.num_steps - 1
        if part:
            first_s += part * (width_s(int(width) + 1) - first_s)
        if a_pass.num_nodes:
            later_s = sum(width_s(1 + a_pass.nodes_at(step + 1)) for step in range(num_later))
        elif num_later:
            later_s = num_later * width_s(1)
        return first_s + later_s

    def _seconds(
        self, num_sequences: int, mean_length: float, width: int, role: ModelRole = ModelRole.TARGET
    ) -> float:
        """Of one pass, at the nearest eighth of a power of two of the context.

        Remembered: a prediction takes longer than what a step on the host may.
        """
        context = int(2.0 ** (round(8 * math.log2(max(1.0, mean_length))) / 8))
        key = (num_sequences, context, width, role)
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            segments = [
                self._plans.segment(slot, context, (0,) * width, num_drafts=width - 1)
                for slot in range(num_sequences)
            ]
            plan = self._plans.plan(segments, role=role)
            self._known[key] = self._predictor.seconds(plan)
        return self._known[key]


def _decodes(a_pass: Pass) -> bool:
    """Whether no prompt is in it; there is none in what is repeated."""
    segments = a_pass.segments
    return a_pass.num_steps > 1 or (
        bool(segments) and all(s.num_tokens - s.num_drafts == 1 for s in segments)
    )
