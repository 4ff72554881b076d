"""Several decode steps in one plan, where nothing can happen between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from ridgeline.core.plan import StepPlan, step_in_flight
from ridgeline.scheduler.blocks import BlockTables
from ridgeline.scheduler.step import SAMPLE, Step

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
        if not self._seconds or self._step_s is None:
            return 1
        return max(1, int(min(MAX_REPLAY_STEPS, self._seconds / max(self._step_s, 1e-9))))


def extend(step: Step, blocks: BlockTables, num_steps: int) -> int:
    """Let a step of plain decodes be repeated ``num_steps`` times; returns how often it will be.

    Fewer times where an output would become too long, once where blocks are short.
    """
    left = min(sequence.max_length - sequence.num_planned for sequence in step.sequences)
    num_steps = min(num_steps, left)
    if num_steps < 2 or not all(
        segment.outputs is SAMPLE and segment.num_tokens == 1 and sequence.is_plain
        for segment, sequence in zip(step.segments, step.sequences, strict=True)
    ):
        return 1
    # ``num_planned`` positions are written by the first of the steps.
    stops = [sequence.num_planned + num_steps - 1 for sequence in step.sequences]
    short = [n for n, stop in enumerate(stops) if stop > step.sequences[n].num_writable]
    if not blocks.has_free(len(short) * (num_steps // blocks.block_tokens + 1)):
        return 1
    for number in short:
        sequence, segment = step.sequences[number], step.segments[number]
        updates, copies = blocks.prepare_write(sequence, sequence.num_planned, stops[number])
        assert not copies, "a block that is being written is shared"
        step.segments[number] = segment._replace(block_updates=segment.block_updates + updates)
    for number, sequence in enumerate(step.sequences):
        num_known = sequence.num_planned
        sequence.num_planned += num_steps - 1
        sequence.num_pending = num_steps
        is_last = num_known + num_steps >= sequence.max_length
        sequence.reference = None if is_last else step_in_flight((number + 1) * num_steps - 1)
    return num_steps
