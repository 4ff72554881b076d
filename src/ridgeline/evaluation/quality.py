"""Perplexity, and how one model's distributions differ from another's over the same tokens.

The figures are those that llama.cpp's ``perplexity --kl-divergence`` gives. Shapes: T tokens of a
document, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LogProbabilities = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of a model on some text, beside a reference.

    Attributes:
        num_tokens: positions compared.
        perplexity: exp of the mean negative log-likelihood of each next token.
        reference_perplexity: the reference's.
        kl: mean KL(reference ‖ model) in nats for each position.
        kl_error: its standard error, taking positions as independent.
        kl_median: of the positions.
        kl_tail: what 99.9% of the positions stay below.
        kl_max: of the positions.
        same_top: share of positions with the same most likely token.
        rms_dp: root mean square of the change in the probability of the token that follows.
    """

    num_tokens: int
    perplexity: float
    reference_perplexity: float
    kl: float
    kl_error: float
    kl_median: float
    kl_tail: float
    kl_max: float
    same_top: float
    rms_dp: float


def log_softmax(logits_TV: npt.NDArray[np.floating]) -> LogProbabilities:
    """Log-probabilities, computed in float64."""
    values = logits_TV.astype(np.float64)
    values -= values.max(-1, keepdims=True)
    values -= np.log(np.exp(values).sum(-1, keepdims=True))
    return values.astype(np.float32)


class QualitySum:
    """Figures over documents, added one at a time: none but four numbers a position are kept."""

    def __init__(self) -> None:
        self._kl: list[npt.NDArray[np.float64]] = []
        self._same: list[npt.NDArray[np.bool_]] = []
        self._said: list[npt.NDArray[np.float32]] = []  # log-probability of the next token
        self._wanted: list[npt.NDArray[np.float32]] = []

    def add(
        self, token_ids: Sequence[int], found_TV: LogProbabilities, reference_TV: LogProbabilities
    ) -> None:
        """Add a document's log-probabilities after each of its tokens."""
        reference = reference_TV.astype(np.float64)
        kl = (np.exp(reference) * (reference - found_TV)).sum(-1)
        rows = np.arange(len(token_ids) - 1)
        self._kl.append(kl)
        self._same.append(found_TV.argmax(-1) == reference_TV.argmax(-1))
        self._said.append(found_TV[rows, list(token_ids[1:])])
        self._wanted.append(reference_TV[rows, list(token_ids[1:])])

    def quality(self) -> Quality:
        """Of all that was added, which is two tokens or more."""
        kl = np.concatenate(self._kl)
        said = np.concatenate(self._said).astype(np.float64)
        wanted = np.concatenate(self._wanted).astype(np.float64)
        return Quality(
            num_tokens=len(kl),
            perplexity=float(np.exp(-said.mean())),
            reference_perplexity=float(np.exp(-wanted.mean())),
            kl=float(kl.mean()),
            kl_error=float(kl.std(ddof=1) / np.sqrt(len(kl))),
            kl_median=float(np.median(kl)),
            kl_tail=float(np.quantile(kl, 0.999)),
            kl_max=float(kl.max()),
            same_top=float(np.concatenate(self._same).mean()),
            rms_dp=float(np.sqrt(np.square(np.exp(said) - np.exp(wanted)).mean())),
        )
