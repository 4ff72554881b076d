"""A step while it is being planned, and once it is in flight."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ridgeline.core.plan import Admission, BlockCopy, Outputs, Segment, StepPlan
from ridgeline.kvcache import KVCacheManager
from ridgeline.scheduler.prediction import StepBudget
from ridgeline.scheduler.sequence import Sequence

SAMPLE = Outputs(sample=True)


@dataclass(slots=True)
class Step:
    """Collects what the step will do. ``busy`` have a part in it, and so keep their blocks."""

    step_id: int
    budget: StepBudget
    asks_drafter: bool
    segments: list[Segment] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)  # of the segments
    admissions: list[Admission] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    busy: set[Sequence] = field(default_factory=set)
    num_outputs: int = 0

    def add(self, sequence: Sequence, segment: Segment, samples: bool, may_continue: bool) -> None:
        """Take a segment. ``may_continue``: the next step may be planned on what it ``samples``."""
        self.segments.append(segment)
        self.sequences.append(sequence)
        start, stop = segment.start, segment.stop
        budget = self.budget
        budget.tokens -= stop - start
        if budget.seconds is not None:
            budget.spend_seconds(stop - start, start)
        sequence.num_planned = stop
        sequence.num_in_flight += 1
        if samples:
            if may_continue:
                sequence.num_known = stop + 1
                sequence.promised_step = self.step_id
                sequence.promised_output = self.num_outputs
            self.num_outputs += 1 + segment.num_drafts

    def repeat(self, num_steps: int, kv: KVCacheManager) -> int:
        """Have a step of plain decodes done ``num_steps`` times; returns how often it will be.

        Fewer times where an output would become too long, once where blocks are short.
        """
        left = min(sequence.max_length - sequence.num_planned for sequence in self.sequences)
        num_steps = min(num_steps, left)
        if num_steps < 2 or not all(
            segment.outputs is SAMPLE and segment.num_tokens == 1 and sequence.is_plain
            for segment, sequence in zip(self.segments, self.sequences, strict=True)
        ):
            return 1
        # ``num_planned`` positions are written by the first of the steps.
        stops = [sequence.num_planned + num_steps - 1 for sequence in self.sequences]
        short = [n for n, stop in enumerate(stops) if stop > self.sequences[n].kv.num_writable]
        if not kv.has_free(len(short) * (num_steps // kv.block_tokens + 1)):
            return 1
        for number in short:
            sequence, segment = self.sequences[number], self.segments[number]
            write = sequence.kv.prepare_write(sequence.num_planned, stops[number])
            assert not write.copies, "a block that is being written is shared"
            self.segments[number] = segment._replace(
                block_updates=segment.block_updates + write.block_updates,
                state_saves=segment.state_saves + write.state_saves,
            )
        for number, sequence in enumerate(self.sequences):
            num_known = sequence.num_planned + num_steps
            sequence.num_planned = num_known - 1
            if num_known < sequence.max_length:
                sequence.num_known = num_known
                sequence.promised_output = (number + 1) * num_steps - 1
        return num_steps


class PlanInFlight(NamedTuple):
    """A plan that was given out; ``sequences`` are those of the target's segments."""

    plan: StepPlan
    sequences: list[Sequence]
    started_s: float
