"""Cases as something that can be run a little at a time, so that cases can take turns."""

import time
from collections.abc import Sequence
from typing import Protocol

from ridgeline.bench.cases import Case, DecodeCase, PrefillCase, RecomputeCase, positions
from ridgeline.bench.steps import PlanTimer, SlotBlocks, TimedStep
from ridgeline.core.protocols import Executor
from ridgeline.core.rounding import ceil_div

Sample = Sequence[TimedStep]  # what one measurement consists of; its time is the sum

_MIN_STEPS = 4


class PreparedCase(Protocol):
    """A case with KV of its own."""

    @property
    def case(self) -> Case: ...

    def prepare(self) -> None:
        """Fill the cache and warm up; once."""

    def visit(self, seconds: float) -> list[Sample]:
        """Run for about ``seconds``."""


class PrefillWorkload:
    """A prompt that is computed from the start each time; one sample a visit."""

    def __init__(
        self, runner: PlanTimer, case: PrefillCase | RecomputeCase, place: SlotBlocks
    ) -> None:
        self.case = case
        self._runner, self._place = runner, place

    def prepare(self) -> None:
        self.visit(0.0)

    def visit(self, seconds: float) -> list[Sample]:
        prompt = self._runner.tokens(self.case.prompt_tokens)
        (slot,) = self._place.slots
        return [list(self._runner.prefill(self._place, slot, prompt, sample=True))]


class DecodeWorkload:
    """Sequences that go on from step to step, at most ``max_steps`` a visit; one sample a step.

    All of them start from one random context, copied into blocks of each one's own.
    """

    def __init__(
        self, runner: PlanTimer, case: DecodeCase, place: SlotBlocks, *, max_steps: int
    ) -> None:
        self.case = case
        self._runner, self._place = runner, place
        self._start = self._position = max(case.context, 1)
        self._end = self._start + max_steps
        self._next: Sequence[int] = runner.tokens(case.batch)

    def prepare(self) -> None:
        context = self._runner.tokens(self._start)
        first = self._place.slots[0]
        for _ in self._runner.prefill(self._place, first, context, sample=False):
            pass
        self._runner.fork(self._place, context)

    def visit(self, seconds: float) -> list[Sample]:
        """Every visit begins behind the context; its first step warms caches up and is left out."""
        self._position = self._start
        self._step()
        samples: list[Sample] = []
        end = time.perf_counter() + seconds
        while self._position < self._end and (
            len(samples) < _MIN_STEPS or time.perf_counter() < end
        ):
            samples.append([self._step()])
        return samples

    def _step(self) -> TimedStep:
        step = self._runner.decode(self._place, self._position, self._next)
        self._position += 1
        self._next = [segment.token_ids[0] for segment in step.result.passes[0]]
        return step


def make_workloads(
    executor: Executor, cases: Sequence[Case], *, chunk_tokens: int, decode_steps: int
) -> list[PreparedCase]:
    """Place the cases side by side in a KV pool that is just large enough.

    Raises:
        OutOfMemoryError: their KV does not fit.
    """
    runner = PlanTimer(executor, chunk_tokens=chunk_tokens)
    layout = executor.kv_layout()
    workloads: list[PreparedCase] = []
    slots = blocks = 0
    for case in cases:
        batch = case.batch if isinstance(case, DecodeCase) else 1
        each = ceil_div(positions(case, decode_steps), layout.block_tokens)
        place = SlotBlocks(slots=range(slots, slots + batch), first_block=blocks, blocks_each=each)
        slots, blocks = slots + batch, blocks + batch * each
        workloads.append(
            DecodeWorkload(runner, case, place, max_steps=decode_steps)
            if isinstance(case, DecodeCase)
            else PrefillWorkload(runner, case, place)
        )
    states = () if layout.states is None else (slots,)
    executor.allocate_kv([*[blocks] * len(layout.groups), *states])
    return workloads
