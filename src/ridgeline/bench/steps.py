"""Steps made by hand: plans without a scheduler, so that what is timed is the executor."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from ridgeline.core.plan import (
    Admission,
    BlockCopy,
    BlockTableUpdate,
    Outputs,
    Pass,
    Segment,
    StepPlan,
)
from ridgeline.core.protocols import Executor
from ridgeline.core.result import StepResult
from ridgeline.core.sampling_params import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """A plan that ran, and the seconds from its submission to its result."""

    plan: StepPlan
    result: StepResult
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
        self._num_groups = len(executor.kv_layout().groups)
        self._random = np.random.default_rng(seed)
        self._step_ids = count(1)
        self._live: set[int] = set()

    def tokens(self, number: int) -> tuple[int, ...]:
        """Random token ids."""
        vocabulary = self._executor.spec().vocab_size
        return tuple(self._random.integers(0, vocabulary, number).tolist())

    def prefill(
        self, place: Place, slot: int, token_ids: Sequence[int], *, sample: bool
    ) -> Iterator[TimedStep]:
        """Compute a prompt from the start, in chunks; with ``sample``, its first output as well."""
        for start in range(0, len(token_ids), self._chunk_tokens):
            stop = min(start + self._chunk_tokens, len(token_ids))
            segment = Segment(
                slot=slot,
                start=start,
                stop=stop,
                token_ids=tuple(token_ids[start:stop]),
                outputs=Outputs(sample=sample and stop == len(token_ids)),
                block_updates=() if start else self._tables(place, slot),
            )
            entering = () if start else self._enter(slot, token_ids)
            yield self._run([segment], admissions=entering, releases=self._left(entering))

    def fork(self, place: Place, token_ids: Sequence[int]) -> None:
        """Give every slot the KV of the first one's tokens, each in blocks of its own."""
        source, *others = place.slots
        if not others:
            return
        copies = tuple(
            BlockCopy(group=group, source=old, target=new)
            for slot in others
            for old, new in zip(place.blocks(source), place.blocks(slot), strict=True)
            for group in range(self._num_groups)
        )
        segments = [
            Segment(
                slot=slot,
                start=len(token_ids) - 1,
                stop=len(token_ids),
                token_ids=(token_ids[-1],),
                block_updates=self._tables(place, slot),
            )
            for slot in others
        ]
        entering = tuple(admission for slot in others for admission in self._enter(slot, token_ids))
        self._run(segments, admissions=entering, copies=copies)

    def decode(self, place: Place, position: int, token_ids: Sequence[int]) -> TimedStep:
        """Compute one token of each slot, at ``position``, and sample the next."""
        return self._run(
            [
                Segment(
                    slot=slot,
                    start=position,
                    stop=position + 1,
                    token_ids=(token,),
                    outputs=Outputs(sample=True),
                )
                for slot, token in zip(place.slots, token_ids, strict=True)
            ]
        )

    def _enter(self, slot: int, token_ids: Sequence[int]) -> tuple[Admission, ...]:
        tokens = tuple(token_ids)
        return (
            Admission(
                slot=slot, token_ids=tokens, num_prompt_tokens=len(tokens), params=_GREEDY, seed=0
            ),
        )

    def _left(self, entering: Sequence[Admission]) -> tuple[int, ...]:
        """Slots that are admitted again, and so have to be released first."""
        return tuple(admission.slot for admission in entering if admission.slot in self._live)

    def _tables(self, place: Place, slot: int) -> tuple[BlockTableUpdate, ...]:
        blocks = place.blocks(slot)
        return tuple(
            BlockTableUpdate(group=group, first=0, blocks=blocks)
            for group in range(self._num_groups)
        )

    def _run(
        self,
        segments: Sequence[Segment],
        *,
        admissions: tuple[Admission, ...] = (),
        releases: tuple[int, ...] = (),
        copies: tuple[BlockCopy, ...] = (),
    ) -> TimedStep:
        plan = StepPlan(
            step_id=next(self._step_ids),
            passes=(Pass(segments=tuple(segments)),),
            admissions=admissions,
            releases=releases,
            copies=copies,
        )
        self._live |= {admission.slot for admission in admissions}
        start = time.perf_counter()
        result = self._executor.submit(plan).result()
        return TimedStep(plan=plan, result=result, seconds=time.perf_counter() - start)
