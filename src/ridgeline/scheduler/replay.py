"""Several decode steps in one plan, where nothing can happen between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from ridgeline.core.plan import StepPlan

MAX_REPLAY_STEPS = 16
_WEIGHT = 0.2  # of the latest step in the mean


class Replay:
    """Chooses how many steps a plan repeats, so that it takes about ``seconds``; 0: always one.

    What arrives meanwhile waits for that long at the most, and text comes in pieces of it. A plan
    never takes longer than ``most_s`` because of it.
    """

    def __init__(self, seconds: float, *, most_s: float | None = None) -> None:
        self._most_s = inf if most_s is None else most_s
        self._seconds = min(seconds, self._most_s)
        self._step_s: float | None = None

    @contextmanager
    def lengthened(self, seconds: float) -> Iterator[None]:
        """For now, at least so long, unless replays are off: where nothing can arrive meanwhile."""
        before = self._seconds
        self._seconds = min(max(before, seconds), self._most_s) if before else 0.0
        try:
            yield
        finally:
            self._seconds = before

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn what a step takes that decodes only."""
        a_pass = plan.passes[-1]
        if self._seconds and a_pass.num_tokens == len(a_pass.segments):
            step_s = seconds / a_pass.num_steps
            before_s = step_s if self._step_s is None else self._step_s
            self._step_s = before_s + _WEIGHT * (step_s - before_s)

    @property
    def num_steps(self) -> int:
        if not self._seconds or not self._step_s:
            return 1
        return max(1, int(min(MAX_REPLAY_STEPS, self._seconds / self._step_s)))
