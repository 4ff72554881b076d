"""Steps made by hand: plans without a scheduler, so that what is timed is the executor."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.core.plan import Admission, BlockCopy, Outputs, Segment, StepPlan
from ridgeline.core.plan_maker import PlanMaker
from ridgeline.core.protocols import Executor
from ridgeline.core.result import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """A plan that ran, and the seconds from its submission to its result."""

    plan: StepPlan
    result: StepResult
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotBlocks:
    """The slots of some sequences, and ``blocks_each`` KV blocks of each from ``first_block`` on.

    In every KV group the blocks have the same numbers.
    """

    slots: range
    first_block: int
    blocks_each: int

    def blocks(self, slot: int) -> tuple[int, ...]:
        """The block table of a slot."""
        first = self.first_block + self.slots.index(slot) * self.blocks_each
        return tuple(range(first, first + self.blocks_each))


class PlanTimer:
    """Submits plans to an executor one by one, and times them."""

    def __init__(self, executor: Executor, *, chunk_tokens: int, seed: int = 0) -> None:
        self._executor = executor
        self._chunk_tokens = chunk_tokens
        layout = executor.kv_layout()
        self._plans = PlanMaker(len(layout.groups), has_states=layout.states is not None)
        self._random = np.random.default_rng(seed)
        self._live: set[int] = set()

    def tokens(self, number: int) -> tuple[int, ...]:
        """Random token ids."""
        vocabulary = self._executor.spec().vocab_size
        return tuple(self._random.integers(0, vocabulary, number).tolist())

    def prefill(
        self, place: SlotBlocks, slot: int, token_ids: Sequence[int], *, sample: bool
    ) -> Iterator[TimedStep]:
        """Compute a prompt from the start, in chunks; with ``sample``, its first output as well."""
        for start in range(0, len(token_ids), self._chunk_tokens):
            stop = min(start + self._chunk_tokens, len(token_ids))
            segment = self._plans.segment(
                slot,
                start,
                token_ids[start:stop],
                blocks=None if start else place.blocks(slot),
                outputs=Outputs(sample=sample and stop == len(token_ids)),
            )
            entering = () if start else (self._plans.admission(slot, token_ids),)
            yield self._run([segment], admissions=entering, releases=self._left(entering))

    def fork(self, place: SlotBlocks, token_ids: Sequence[int]) -> None:
        """Give every slot the KV of the first one's tokens, each in blocks of its own.

        Not their states: what these hold changes the time of no step.
        """
        source, *others = place.slots
        if not others:
            return
        copies = [
            copy
            for slot in others
            for copy in self._plans.copies(place.blocks(source), place.blocks(slot))
        ]
        segments = [
            self._plans.segment(
                slot,
                len(token_ids) - 1,
                token_ids[-1:],
                blocks=place.blocks(slot),
                outputs=Outputs(),
            )
            for slot in others
        ]
        entering = [self._plans.admission(slot, token_ids) for slot in others]
        self._run(segments, admissions=entering, copies=copies)

    def decode(self, place: SlotBlocks, position: int, token_ids: Sequence[int]) -> TimedStep:
        """Compute one token of each slot, at ``position``, and sample the next."""
        return self._run(
            [
                self._plans.segment(slot, position, (token,))
                for slot, token in zip(place.slots, token_ids, strict=True)
            ]
        )

    def _left(self, entering: Sequence[Admission]) -> tuple[int, ...]:
        """Slots that are admitted again, and so have to be released first."""
        return tuple(admission.slot for admission in entering if admission.slot in self._live)

    def _run(
        self,
        segments: Sequence[Segment],
        *,
        admissions: Sequence[Admission] = (),
        releases: Sequence[int] = (),
        copies: Sequence[BlockCopy] = (),
    ) -> TimedStep:
        plan = self._plans.plan(segments, admissions=admissions, releases=releases, copies=copies)
        self._live |= {admission.slot for admission in admissions}
        start = time.perf_counter()
        result = self._executor.submit(plan).result()
        return TimedStep(plan=plan, result=result, seconds=time.perf_counter() - start)
