"""Plans written by hand, without a scheduler: for measurements and prices."""

from collections.abc import Sequence
from itertools import count

from ridgeline.core.plan import (
    Admission,
    BlockCopy,
    BlockTableUpdate,
    ModelRole,
    Outputs,
    Pass,
    Segment,
    StepPlan,
)
from ridgeline.core.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
_SAMPLE = Outputs(sample=True)


class PlanMaker:
    """Numbers plans, and gives a sequence blocks of the same numbers in each of the KV groups.

    If the model ``has_states``, the state of a slot is that of the slot's number.
    """

    def __init__(self, num_groups: int = 1, *, has_states: bool = False) -> None:
        self._groups, self._has_states = range(num_groups), has_states
        self._step_ids = count(1)

    def admission(
        self, slot: int, token_ids: Sequence[int], params: SamplingParams = GREEDY
    ) -> Admission:
        """A sequence of which all these tokens are the prompt."""
        return Admission(
            slot=slot,
            token_ids=tuple(token_ids),
            num_prompt_tokens=len(token_ids),
            params=params,
            seed=0,
        )

    def segment(
        self,
        slot: int,
        start: int,
        token_ids: Sequence[int],
        *,
        blocks: Sequence[int] | None = None,
        num_drafts: int = 0,
        outputs: Outputs = _SAMPLE,
    ) -> Segment:
        """Positions from ``start`` on. ``blocks`` is the slot's whole block table, if it is new."""
        return Segment(
            slot=slot,
            start=start,
            stop=start + len(token_ids),
            token_ids=tuple(token_ids),
            num_drafts=num_drafts,
            outputs=outputs,
            block_updates=() if blocks is None else self._tables(slot, tuple(blocks)),
        )

    def _tables(self, slot: int, blocks: tuple[int, ...]) -> tuple[BlockTableUpdate, ...]:
        tables = [BlockTableUpdate(group=group, first=0, blocks=blocks) for group in self._groups]
        if self._has_states:
            tables.append(BlockTableUpdate(group=len(self._groups), first=0, blocks=(slot,)))
        return tuple(tables)

    def copies(self, sources: Sequence[int], targets: Sequence[int]) -> tuple[BlockCopy, ...]:
        """Blocks copied one by one, in every KV group."""
        return tuple(
            BlockCopy(group=group, source=source, target=target)
            for source, target in zip(sources, targets, strict=True)
            for group in self._groups
        )

    def plan(
        self,
        segments: Sequence[Segment],
        *,
        role: ModelRole = ModelRole.TARGET,
        num_steps: int = 1,
        admissions: Sequence[Admission] = (),
        releases: Sequence[int] = (),
        copies: Sequence[BlockCopy] = (),
    ) -> StepPlan:
        """A plan of one pass."""
        return StepPlan(
            step_id=next(self._step_ids),
            passes=(Pass(segments=tuple(segments), role=role, num_steps=num_steps),),
            admissions=tuple(admissions),
            releases=tuple(releases),
            copies=tuple(copies),
        )
