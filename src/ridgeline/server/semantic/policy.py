"""When an answer may stand in for another question's: per-entry thresholds with a bound on errors.

After vCache (Schroeder et al., arXiv 2502.03771, section 4): each entry learns, from questions that
came near it and were answered anew, how the chance of being right grows with similarity.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

# The prior: thresholds of cosine similarity up to beyond 1, where not even the same text would do,
# slopes, and shares of questions that are other ones however similar (opposites, numbers, names).
_GRIDS = np.meshgrid(
    np.linspace(0.5, 1.3, 41), np.geomspace(4.0, 256.0, 7), (0.0, 0.01, 0.03, 0.1, 0.3)
)
_T, _G, _OTHER = (grid.ravel().astype(np.float32) for grid in _GRIDS)


class EntryThreshold:
    """What is known of one entry: similarities at which its answer was right, or wrong.

    The chance of being right at similarity s is ``(1 − λ)·σ(γ·(s − t))``: vCache's, but for λ, the
    share that no threshold tells apart. The three have a posterior on a grid rather than one
    estimate with a band, so that few observations, or ones that no t separates, need no special
    case. It takes 6 KB.
    """

    def __init__(self) -> None:
        self.num_observations = 0
        self._log_weights: Floats | None = None

    def observe(self, similarity: float, is_right: bool) -> None:
        """A question at this similarity was answered anew, and its answer compared."""
        right = _right(similarity)
        seen = np.log(np.maximum(right if is_right else 1.0 - right, 1e-6))
        self._log_weights = seen if self._log_weights is None else self._log_weights + seen
        self.num_observations += 1

    def chance_right(self, similarity: float) -> float:
        """The expected chance that the entry's answer is right, 0 to 1."""
        right = _right(similarity)
        if self._log_weights is None:
            return float(right.mean())
        weights = np.exp(self._log_weights - self._log_weights.max())
        return float(weights @ right / weights.sum())


def _right(similarity: float) -> Floats:
    margin = np.minimum(_G * (_T - np.float32(similarity)), 60.0)  # whose exp is finite
    return ((1.0 - _OTHER) / (1.0 + np.exp(margin))).astype(np.float32)


def binomial_interval(wrong: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of Clopper and Pearson (1934) for a share of which ``wrong`` of ``total`` are.

    >>> [round(end, 4) for end in binomial_interval(0, 100)]
    [0.0, 0.0362]
    """
    tail = (1.0 - confidence) / 2
    if total == 0:
        return 0.0, 1.0
    low = 0.0 if wrong == 0 else _root(lambda p: _at_most(wrong - 1, total, p) < 1 - tail)
    high = 1.0 if wrong == total else _root(lambda p: _at_most(wrong, total, p) < tail)
    return low, high


def _at_most(count: int, total: int, p: float) -> float:
    """The chance of ``count`` or fewer of ``total``, each with chance p."""
    if p <= 0.0 or p >= 1.0:
        return 1.0 if p <= 0.0 or count >= total else 0.0
    terms = (
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        + k * math.log(p) + (total - k) * math.log1p(-p)
        for k in range(count + 1)
    )  # fmt: skip
    return min(1.0, math.fsum(map(math.exp, terms)))


def _root(is_beyond: Callable[[float], bool]) -> float:
    """Where a condition on 0 to 1 begins to hold."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if is_beyond(middle) else (middle, high)
    return high
