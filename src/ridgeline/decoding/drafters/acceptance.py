"""How often drafts are accepted, by position, measured as they are verified."""

from itertools import accumulate
from operator import mul

_MEMORY = 0.985  # weight of what was seen one verification ago
_BEFORE_TRIES = 4.0  # verifications that the rate of the position before counts for
_PRIOR_TRIES = 12.0  # and that of all sequences: with less, chance would pass for a difference
_FIRST_GUESS = 0.6  # before anything was seen


class Acceptance:
    """Per position: how often a draft was accepted, given that those before it were.

    Observations fade, so that the estimate follows the text. What was not tried is taken to be as
    the position before it, so that longer drafts are tried where shorter ones do well; a sequence
    that has shown nothing is taken to be as all others (its ``prior``).
    """

    def __init__(self, max_tokens: int, prior: "Acceptance | None" = None) -> None:
        self._prior = prior
        self._tries = [0.0] * max_tokens
        self._hits = [0.0] * max_tokens
        self._rates: list[float] | None = None

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """A draft of so many tokens was verified. What follows a rejection was not tried."""
        for position in range(min(num_drafted, num_accepted + 1, len(self._tries))):
            hit = position < num_accepted
            self._tries[position] = self._tries[position] * _MEMORY + 1
            self._hits[position] = self._hits[position] * _MEMORY + hit
        self._rates = None
        if self._prior is not None:
            self._prior.observe(num_drafted, num_accepted)

    def rates(self) -> list[float]:
        """Probability of each position, given the ones before."""
        if self._rates is None:
            rates, before = [], _FIRST_GUESS
            for position, (tries, hits) in enumerate(zip(self._tries, self._hits, strict=True)):
                weight = _BEFORE_TRIES
                if self._prior is not None:
                    weight, before = _PRIOR_TRIES, self._prior.rates()[position]
                before = (hits + weight * before) / (tries + weight)
                rates.append(before)
            self._rates = rates
        return self._rates

    def gains(self) -> list[float]:
        """Expected tokens that drafting one position more adds."""
        return list(accumulate(self.rates(), mul))
