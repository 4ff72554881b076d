"""How many tokens to draft for each sequence: the most expected tokens per predicted second."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ridgeline.core.plan import ModelRole, Outputs, Pass, Segment, StepPlan
from ridgeline.core.protocols import StepPrice

_SAMPLE = Outputs(sample=True)
_WEIGHT = 0.25  # of the latest step in the mean
_MOST_OFF = math.log(4.0)  # a step that is further off than that from the mean was interrupted
_KEPT_STEPS = 256  # after which a kind of step that was not seen again is tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``lengths[i]`` tokens are drafted for sequence i; ``rate`` is tokens per second."""

    lengths: tuple[int, ...]
    rate: float


def choose_lengths(
    gains_NK: npt.NDArray[np.float64],
    verify_seconds: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
    draft_seconds: float = 0.0,
    slow_down: float = 1.0,
) -> Choice:
    """The lengths with the best ratio of expected tokens to seconds.

    ``gains_NK[i, j]``: expected tokens that the draft's position j adds for sequence i; falls along
    j, since a position counts only if those before it are accepted. Positions are taken in order of
    their gain over all sequences, so every prefix of that order is a set of chains, and no other
    set of as many positions gains more. ``verify_seconds`` maps the step's tokens to seconds;
    steps with drafts take ``slow_down`` times as long as it says, beside those without.
    """
    num_sequences = len(gains_NK)
    flat = gains_NK.ravel()
    order = np.argsort(-flat, kind="stable")
    order = order[: np.count_nonzero(flat)]
    expected = num_sequences + np.concatenate([[0.0], np.cumsum(flat[order])])
    tokens = num_sequences + np.arange(len(expected), dtype=np.float64)
    seconds = verify_seconds(tokens)
    seconds[1:] = (seconds[1:] + draft_seconds) * slow_down
    rates = expected / seconds
    best = int(rates.argmax())
    rows = order[:best] // max(1, gains_NK.shape[1])
    lengths = np.bincount(rows, minlength=num_sequences)
    return Choice(lengths=tuple(lengths.tolist()), rate=float(rates[best]))


class _Kind(NamedTuple):
    """Steps of which the price is off by about the same factor.

    ``size`` is the number of sequences as a power of two, ``chain`` that of draft passes.
    """

    size: int
    chain: int
    drafts: bool


@dataclass(slots=True)
class _Factor:
    """The mean logarithm of measured over predicted seconds, and the last step that went in."""

    log: float
    step: int


class StepCosts:
    """Seconds of verification and of draft passes, from the price of plans as they would be.

    What steps of each kind really took corrects the price, which knows the model's passes and not
    what the host does between them.
    """

    def __init__(self, price: StepPrice, *, max_tokens: int) -> None:
        self._price = price
        self._max_tokens = max_tokens
        self._known: dict[tuple[int, int], tuple[npt.NDArray[np.float64], float]] = {}
        self._factors: dict[_Kind, _Factor] = {}
        self._num_steps = 0

    def of(
        self, num_sequences: int, mean_length: float
    ) -> tuple[Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]], float]:
        """Seconds by tokens of a target pass, and of one step of the draft model.

        Asked anew when the batch or, by an eighth, the context has changed.
        """
        context = int(2.0 ** (round(8 * np.log2(max(1.0, mean_length))) / 8))
        key = (num_sequences, context)
        if key not in self._known:
            if len(self._known) >= 256:
                self._known.clear()
            widths = range(1, self._max_tokens + 2)
            target = [
                self._seconds(_pass(num_sequences, context, width, ModelRole.TARGET))
                for width in widths
            ]
            draft = self._seconds(_pass(num_sequences, context, 1, ModelRole.DRAFT))
            self._known[key] = (np.array(target), draft)
        seconds, draft = self._known[key]
        tokens = num_sequences * np.arange(1, self._max_tokens + 2)
        return lambda wanted: np.interp(wanted, tokens, seconds), draft

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that decoded only."""
        kind = _kind(plan)
        predicted = self._price.seconds(plan)
        if kind is None or seconds <= 0 or predicted <= 0:
            return
        self._num_steps += plan.passes[-1].num_steps
        log, known = math.log(seconds / predicted), self._factors.get(kind)
        if known is None or self._num_steps - known.step > _KEPT_STEPS:
            self._factors[kind] = _Factor(log, self._num_steps)
            return
        off = max(-_MOST_OFF, min(_MOST_OFF, log - known.log))
        known.log, known.step = known.log + _WEIGHT * off, self._num_steps

    def factors(self, num_sequences: int) -> tuple[float, list[float]]:
        """Measured over predicted seconds without drafts, and by how much more with chains of each
        length from 0.

        What has not been measured lately is taken from the nearest chain.
        """
        size = num_sequences.bit_length()
        plain = self._factors.get(_Kind(size, 0, drafts=False))
        if plain is None:
            return 1.0, [1.0] * (self._max_tokens + 1)
        lately = {
            kind.chain: factor.log
            for kind, factor in self._factors.items()
            if kind.drafts and kind.size == size and self._num_steps - factor.step <= _KEPT_STEPS
        } or {0: plain.log}
        nearest = [
            min(lately, key=lambda known: abs(known - chain))
            for chain in range(self._max_tokens + 1)
        ]
        return math.exp(plain.log), [math.exp(lately[chain] - plain.log) for chain in nearest]

    def _seconds(self, a_pass: Pass) -> float:
        return self._price.seconds(StepPlan(step_id=0, passes=(a_pass,)))


def _kind(plan: StepPlan) -> _Kind | None:
    """``None`` if a prompt is in it."""
    *chain, target = plan.passes
    if target.role is not ModelRole.TARGET or not target.segments:
        return None
    if any(segment.num_tokens - segment.num_drafts > 1 for segment in target.segments):
        return None
    drafts = any(segment.num_drafts for segment in target.segments)
    return _Kind(len(target.segments).bit_length(), len(chain), drafts)


def _pass(num_sequences: int, context: int, width: int, role: ModelRole) -> Pass:
    segments: Sequence[Segment] = [
        Segment(
            slot=slot,
            start=context,
            stop=context + width,
            token_ids=(0,) * width,
            num_drafts=width - 1,
            outputs=_SAMPLE,
        )
        for slot in range(num_sequences)
    ]
    return Pass(segments=tuple(segments), role=role)
