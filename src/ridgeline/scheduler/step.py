"""A step while it is being planned, and once it is in flight."""

from dataclasses import dataclass, field

from ridgeline.core.plan import Admission, BlockCopy, Segment, StepPlan, step_in_flight
from ridgeline.scheduler.pricing import StepBudget
from ridgeline.scheduler.sequence import Sequence


@dataclass(slots=True)
class Step:
    """Collects what the step will do. ``busy`` have a part in it, and so keep their blocks."""

    budget: StepBudget
    segments: list[Segment] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)  # of the segments
    admissions: list[Admission] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    busy: set[Sequence] = field(default_factory=set)
    num_outputs: int = 0

    def add(self, sequence: Sequence, segment: Segment, *, may_continue: bool) -> None:
        """Take a segment. ``may_continue``: the next step may be planned on the token sampled."""
        self.segments.append(segment)
        self.sequences.append(sequence)
        self.budget.spend(segment.stop - segment.start, segment.start)
        sequence.num_planned = segment.stop
        sequence.num_in_flight += 1
        sequence.reference = step_in_flight(self.num_outputs) if may_continue else None
        if segment.outputs.sample:
            self.num_outputs += 1 + segment.num_drafts


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan that was given out; ``sequences`` are those of the target's segments."""

    plan: StepPlan
    sequences: list[Sequence]
    started_s: float
