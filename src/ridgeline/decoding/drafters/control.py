"""How many tokens to draft for each sequence: the most expected tokens per predicted second."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.core.plan import ModelRole, Outputs, Pass, Segment, StepPlan
from ridgeline.core.protocols import StepPrice

_SAMPLE = Outputs(sample=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``lengths[i]`` tokens are drafted for sequence i; ``rate`` is tokens per second."""

    lengths: tuple[int, ...]
    rate: float


def choose_lengths(
    gains_NK: npt.NDArray[np.float64],
    verify_seconds: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
    draft_seconds: float = 0.0,
) -> Choice:
    """The lengths with the best ratio of expected tokens to seconds.

    ``gains_NK[i, j]``: expected tokens that the draft's position j adds for sequence i; falls along
    j, since a position counts only if those before it are accepted. Positions are taken in order of
    their gain over all sequences, so every prefix of that order is a set of chains, and no other
    set of as many positions gains more. ``verify_seconds`` maps the step's tokens to seconds.
    """
    num_sequences = len(gains_NK)
    flat = gains_NK.ravel()
    order = np.argsort(-flat, kind="stable")
    order = order[: np.count_nonzero(flat)]
    expected = num_sequences + np.concatenate([[0.0], np.cumsum(flat[order])])
    tokens = num_sequences + np.arange(len(expected), dtype=np.float64)
    seconds = verify_seconds(tokens)
    seconds[1:] += draft_seconds
    rates = expected / seconds
    best = int(rates.argmax())
    rows = order[:best] // max(1, gains_NK.shape[1])
    lengths = np.bincount(rows, minlength=num_sequences)
    return Choice(lengths=tuple(lengths.tolist()), rate=float(rates[best]))


class StepCosts:
    """Seconds of verification and of draft passes, from the price of plans as they would be."""

    def __init__(self, price: StepPrice, *, max_tokens: int) -> None:
        self._price = price
        self._max_tokens = max_tokens
        self._known: dict[tuple[int, int], tuple[npt.NDArray[np.float64], float]] = {}

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

    def _seconds(self, a_pass: Pass) -> float:
        return self._price.seconds(StepPlan(step_id=0, passes=(a_pass,)))


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
