"""What is believed of candidates: physics as the mean, shared doubts of each change, and pairs.

The logarithm of a candidate's value over the default's is normal. Its mean is what the simulation
predicts. Its deviation is the sum of one for each change, which all candidates with that change
share (a format that is slower than predicted is so in each), and one of its own. A pair, measured
in turn with the default, is that logarithm with noise (Gaussian process regression, Rasmussen and
Williams 2006, chapter 2, over a linear kernel). Pairs of one turn share the default's noise, so
that candidates of a turn are compared with each other, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

from ridgeline.optimize.space import Candidate

_OWN = 0.03  # deviation that a candidate has alone
_OTHER = 0.08  # of a change of which nothing else is known
_NOISE, _NOISE_COUNT = 0.12, 3.0  # of a pair, and how many pairs that guess is worth
_DRAWS = 4000
_BOUND = 1.2816  # deviations: the upper end of an 80 % interval
_NOT_WORTH = 0.02  # that one more change seems to add
MARGIN = log(1.05)  # what a choice may miss

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of the logarithm of a candidate's value over the default's: mean and standard deviation."""

    mean: float
    deviation: float
    num_pairs: int


class Belief:
    """Of ``candidates``, the first of which is the default.

    Args:
        candidates: none twice.
        means: predicted logarithms; the default's is 0.
        doubts: standard deviations of the effects of settings, by name.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        means: Sequence[float],
        doubts: Mapping[str, float],
    ) -> None:
        self.candidates = tuple(candidates)
        self.means = np.array(means)
        self._prior = _covariance(candidates, doubts)
        self._pairs: list[tuple[int, float, int]] = []  # candidate, ratio, turn
        self._num_turns = 0

    def observe(self, log_ratios: Mapping[Candidate, float]) -> None:
        """Learn from a turn: the pairs of each candidate in it with the default."""
        self._pairs += [
            (self.candidates.index(candidate), ratio, self._num_turns)
            for candidate, ratio in log_ratios.items()
        ]
        self._num_turns += 1

    def estimate(self, candidate: Candidate) -> Estimate:
        """What is believed now."""
        index = self.candidates.index(candidate)
        mean, covariance = self._posterior()
        return Estimate(
            mean=float(mean[index]),
            deviation=float(np.sqrt(max(0.0, covariance[index, index]))),
            num_pairs=sum(index == each for each, *_ in self._pairs),
        )

    def best(self, allowed: Sequence[bool]) -> int:
        """The candidate of the highest mean of those that are ``allowed``; of equals the first."""
        return int(np.argmax(np.where(allowed, self._posterior()[0], -np.inf)))

    def simplest(self, best: Candidate, known: Sequence[Candidate]) -> Candidate:
        """Of the known ones without any other changes than the best's that are as good, but for
        what no change is worth, the one of the fewest."""
        mean, _ = self._posterior()
        means = dict(zip(self.candidates, mean, strict=True))
        equal = [
            each
            for each in known
            if each.changes
            and set(each.changes) <= set(best.changes)
            and means[each] > means[best] - _NOT_WORTH
        ]
        return min(equal, key=lambda each: len(each.changes), default=best)

    def next(self, allowed: Sequence[bool], count: int = 1) -> list[int]:
        """Of those that are allowed, other than the default, the ones of the highest upper bounds,
        the highest first."""
        mean, covariance = self._posterior()
        upper = mean + _BOUND * np.sqrt(np.maximum(0.0, np.diagonal(covariance)))
        order = np.argsort(-upper, kind="stable")
        return [int(index) for index in order if index and allowed[index]][:count]

    def risk(self, allowed: Sequence[bool], choice: int | None = None) -> float:
        """The probability that a choice (`best` without one) misses more than `MARGIN` of the best
        that is allowed."""
        mean, covariance = self._posterior()
        rng = np.random.default_rng(0)
        draws = rng.multivariate_normal(mean, covariance, _DRAWS, check_valid="ignore")
        draws[:, ~np.asarray(allowed, dtype=bool)] = -np.inf
        chosen = self.best(allowed) if choice is None else choice
        missed = draws.max(axis=1) - draws[:, chosen]
        return float((missed > MARGIN).mean())

    def _posterior(self) -> tuple[Floats, Floats]:
        if not self._pairs:
            return self.means, self._prior
        indices = [index for index, *_ in self._pairs]
        turns = np.array([turn for *_, turn in self._pairs])
        residuals = np.array([ratio for _, ratio, _ in self._pairs]) - self.means[indices]
        of_visit = self._noise() ** 2 / 2  # one of the candidate, one of the default
        noise = of_visit * (np.eye(len(indices)) + (turns[:, None] == turns))
        covered = self._prior[np.ix_(indices, indices)]
        gain = np.linalg.solve(covered + noise, self._prior[indices]).T
        return self.means + gain @ residuals, self._prior - gain @ self._prior[indices]

    def _noise(self) -> float:
        """Standard deviation of a pair: a guess, and what repeated pairs of one candidate show."""
        squares, count = _NOISE_COUNT * _NOISE**2, _NOISE_COUNT
        for index in {index for index, *_ in self._pairs}:
            ratios = [ratio for each, ratio, _ in self._pairs if each == index]
            squares += float(np.square(np.array(ratios) - np.mean(ratios)).sum())
            count += len(ratios) - 1
        return float(np.sqrt(squares / count))


def _covariance(candidates: Sequence[Candidate], doubts: Mapping[str, float]) -> Floats:
    size = len(candidates)
    covariance = np.zeros((size, size))
    for row, one in enumerate(candidates):
        for column, other in enumerate(candidates):
            shared = set(one.changes) & set(other.changes)
            covariance[row, column] = sum(doubts.get(name, _OTHER) ** 2 for name, _ in shared)
        if one.changes:
            covariance[row, row] += _OWN**2
    return covariance
