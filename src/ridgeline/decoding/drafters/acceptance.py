"""How often drafts are accepted, by position, measured as they are verified."""

import numpy as np
import numpy.typing as npt

Gains = npt.NDArray[np.float64]

_MEMORY = 0.97  # weight of what was seen one verification ago
_PRIOR_TRIES = 3.0  # verifications that a prior counts for
_FIRST_GUESS = 0.6  # of each position, before anything was seen


class Acceptance:
    """Per position: how often a draft was accepted, given that those before it were.

    Observations fade, so that the estimate follows the text; a ``prior`` (that of all sequences)
    stands in for what this one has not shown yet.
    """

    def __init__(self, max_tokens: int, prior: "Acceptance | None" = None) -> None:
        self._prior = prior
        self._tries = np.zeros(max_tokens)
        self._hits = np.zeros(max_tokens)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """A draft of so many tokens was verified. What follows a rejection was not tried."""
        tried = min(num_drafted, num_accepted + 1, len(self._tries))
        self._tries[:tried] *= _MEMORY
        self._hits[:tried] *= _MEMORY
        self._tries[:tried] += 1
        self._hits[: min(num_accepted, tried)] += 1
        if self._prior is not None:
            self._prior.observe(num_drafted, num_accepted)

    def rates(self) -> Gains:
        """Probability of each position, given the ones before."""
        prior = self._prior.rates() if self._prior is not None else _FIRST_GUESS
        rates: Gains = (self._hits + _PRIOR_TRIES * prior) / (self._tries + _PRIOR_TRIES)
        return rates

    def gains(self) -> Gains:
        """Expected tokens that drafting one position more adds."""
        return np.cumprod(self.rates(), dtype=np.float64)
