"""A step while it is being planned, and once it is in flight."""

from dataclasses import dataclass, field

from ridgeline.core.plan import Admission, BlockCopy, Outputs, Segment, StepPlan, step_in_flight
from ridgeline.scheduler.pricing import StepBudget
from ridgeline.scheduler.sequence import Sequence

SAMPLE = Outputs(sample=True)


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
        sequence.num_pending = 1
        sequence.reference = step_in_flight(self.num_outputs) if may_continue else None
        if segment.outputs.sample:
            self.num_outputs += 1 + segment.num_drafts

    def add_decode(self, sequence: Sequence, num_known: int) -> None:
        """Take the last known token of a sequence that is plain and has the place for its KV.

        The same as `add` for the one kind of segment that there may be hundreds of.
        """
        start, reference = num_known - 1, sequence.reference
        assert sequence.slot is not None
        self.segments.append(
            Segment(
                slot=sequence.slot,
                start=start,
                stop=num_known,
                token_ids=(sequence.token_ids[-1] if reference is None else reference,),
                outputs=SAMPLE,
            )
        )
        self.sequences.append(sequence)
        self.busy.add(sequence)
        self.budget.spend(1, start)
        sequence.num_planned = num_known
        sequence.num_in_flight += 1
        sequence.num_pending = 1
        is_last = num_known + 1 >= sequence.max_length
        sequence.reference = None if is_last else step_in_flight(self.num_outputs)
        self.num_outputs += 1


@dataclass(frozen=True, slots=True)
class PlanInFlight:
    """A plan that was given out; ``sequences`` are those of the target's segments."""

    plan: StepPlan
    sequences: list[Sequence]
    started_s: float
