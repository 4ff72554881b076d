"""How much time drafts may lose where they do not pay."""

import math

from ridgeline.core.plan import Pass
from ridgeline.decoding.drafters.control import StepCosts

SHARE = 0.01  # of the time of decode steps
CREDIT = 8.0  # steps that may be lost ahead, or are owed at the most


class Budget:
    """An account of the time that drafts lost less what they gained, in steps without drafts.

    A step that waits for the drafter is not planned ahead or repeated, so it takes longer even if
    nothing is drafted in it. What it takes beyond as many steps without drafts as it yielded tokens
    is lost; `SHARE` of all time may be, and after that the drafter rests. Steps with a prompt in
    them are left out.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._lost = -CREDIT
        self._each = 0.0  # what a token of one sequence is worth that was accepted in this step

    def skip(self) -> None:
        """A step with a prompt in it ended: nothing is lost, and nothing `gained`."""
        self._each = 0.0

    def observe(self, target: Pass, seconds: float, *, was_asked: bool) -> None:
        """A step that decoded ended; what its drafts `gained` is told after it."""
        if not self._costs.knows_plain(target):
            self.skip()
            return
        self._each = 1.0 / len(target.segments)
        if was_asked:
            lost = (1 - SHARE) * seconds / self._costs.plain_s(target) - 1.0
            self._lose(min(lost, CREDIT))  # a step that takes longer was interrupted
        else:
            self._lose(-SHARE * target.num_steps)

    def gained(self, num_tokens: int) -> None:
        """Tokens of one sequence that would have taken steps of their own."""
        self._lose(-self._each * num_tokens)

    def rest_steps(self) -> int:
        """For how many steps nothing may be lost: until all credit is back."""
        return math.ceil((self._lost + CREDIT) / SHARE) if self._lost > 0 else 0

    def _lose(self, steps: float) -> None:
        self._lost = min(CREDIT, max(-CREDIT, self._lost + steps))
