"""How often drafts are accepted, by place, measured as they are verified."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MEMORY = 0.985  # weight of what was seen one verification ago
_BEFORE_TRIES = 4.0  # verifications that the rate of the position before counts for
_PRIOR_TRIES = 12.0  # and that of all sequences: with less, chance would pass for a difference
_FIRST_GUESS = 0.6  # before anything was seen


class Acceptance:
    """Per position: how often a draft was accepted, given that the one before it was.

    The positions of a tree are those of its nodes, best first; there the rates are ratios of how
    often one node and the one before it are accepted, of which at the most one can be where both
    follow the same token.

    Observations fade, so that the estimate follows the text. What was not tried lately is taken to
    be as the position before it, so that longer drafts are tried where shorter ones do well; a
    sequence that has shown nothing is taken to be as all others (its ``prior``, which learns of it
    too).
    """

    def __init__(self, max_tokens: int, prior: "Acceptance | None" = None) -> None:
        self._prior = prior
        self._tries_K = np.zeros(max_tokens)
        self._hits_K = np.zeros(max_tokens)

    def observe(self, num_drafted: int, accepted: Sequence[int]) -> None:
        """A draft of so many tokens was verified, and those at the positions ``accepted`` taken."""
        tried = [0, *(place + 1 for place in accepted if place + 1 < num_drafted)]
        for counts_K, places in ((self._tries_K, tried), (self._hits_K, list(accepted))):
            counts_K *= _MEMORY
            counts_K[places] += 1
        if self._prior is not None:
            self._prior.observe(num_drafted, accepted)

    def rates(self) -> npt.NDArray[np.float64]:
        """Probability ``[K]`` of each position, given the ones before."""
        if self._prior is not None:
            hits_K = self._hits_K + _PRIOR_TRIES * self._prior.rates()
            return np.minimum(1.0, hits_K / (self._tries_K + _PRIOR_TRIES))
        rates_K, before = np.empty(len(self._tries_K)), _FIRST_GUESS
        for position, tries in enumerate(self._tries_K):
            hits = self._hits_K[position] + _BEFORE_TRIES * before
            rates_K[position] = before = min(1.0, hits / (tries + _BEFORE_TRIES))
        return rates_K


def expected_gains(sequences: Sequence[Acceptance], prior: Acceptance) -> npt.NDArray[np.float64]:
    """Expected tokens ``[N, K]`` that drafting one position more adds, all of one prior."""
    tries_NK = np.array([each._tries_K for each in sequences])
    hits_NK = np.array([each._hits_K for each in sequences])
    rates_NK = (hits_NK + _PRIOR_TRIES * prior.rates()) / (tries_NK + _PRIOR_TRIES)
    return np.cumprod(np.minimum(1.0, rates_NK), axis=1, dtype=np.float64)
