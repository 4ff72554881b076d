"""Seconds of single steps of an executor, by hand-written plans: no scheduler, no requests."""

import time
from dataclasses import dataclass

from ridgeline.core.plan import (
    Admission,
    BlockTableUpdate,
    ModelRole,
    Outputs,
    Pass,
    Segment,
    StepPlan,
)
from ridgeline.core.protocols import Executor
from ridgeline.core.sampling_params import SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
_TOKEN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """``batch_size`` segments that compute ``num_tokens`` each, after ``context`` others."""

    batch_size: int
    num_tokens: int
    context: int

    @property
    def phase(self) -> str:
        return "prefill" if self.num_tokens > 1 else "decode"

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(self.context, self.context + self.num_tokens)] * self.batch_size

    def __str__(self) -> str:
        return f"{self.batch_size}×{self.num_tokens}@{self.context}"


class StepTimer:
    """Owns an executor's KV pool; each sequence has blocks of its own, filled with real K and V."""

    def __init__(self, executor: Executor, *, max_batch: int, max_context: int) -> None:
        self._executor = executor
        layout = executor.kv_layout()
        self._columns = -(-max_context // layout.block_tokens)
        self._num_groups = len(layout.groups)
        executor.allocate_kv([max_batch * self._columns] * self._num_groups)
        self._step_id = 0
        self._admit(max_batch, max_context)
        self._fill(max_batch, layout.block_tokens)

    def plan(self, shape: StepShape) -> StepPlan:
        """The plan whose seconds `measure` gives."""
        segments = tuple(
            Segment(
                slot=slot,
                start=start,
                stop=stop,
                token_ids=(_TOKEN,) * (stop - start),
                outputs=Outputs(sample=True),
            )
            for slot, (start, stop) in enumerate(shape.ranges)
        )
        self._step_id += 1
        return StepPlan(step_id=self._step_id, passes=(Pass(segments=segments),))

    def measure(self, shape: StepShape, *, min_s: float = 0.25, max_repeats: int = 15) -> float:
        """Lower quartile of the seconds from submission to result, after a step that warms up.

        Neighbours on the machine only ever add to a step, so that the faster half is the truer one.
        Five steps at least, or three where they are long.
        """
        self.run(self.plan(shape))
        times = [self.run(self.plan(shape))]
        least = 3 if times[0] > min_s / 2 else 5
        while len(times) < least or (sum(times) < min_s and len(times) < max_repeats):
            times.append(self.run(self.plan(shape)))
        return sorted(times)[(len(times) - 1) // 4]

    def run(self, plan: StepPlan) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self._executor.submit(plan).result()
        return time.perf_counter() - start

    def _admit(self, count: int, length: int) -> None:
        """Admit the sequences with their whole block tables, by computing one token of each."""
        self._step_id += 1
        admissions, segments = [], []
        for slot in range(count):
            admissions.append(
                Admission(
                    slot=slot,
                    token_ids=(_TOKEN,) * length,
                    num_prompt_tokens=length,
                    params=_GREEDY,
                    seed=0,
                )
            )
            first = slot * self._columns
            blocks = tuple(range(first, first + self._columns))
            segments.append(
                Segment(
                    slot=slot,
                    start=0,
                    stop=1,
                    token_ids=(_TOKEN,),
                    block_updates=tuple(
                        BlockTableUpdate(group=group, first=0, blocks=blocks)
                        for group in range(self._num_groups)
                    ),
                )
            )
        plan = StepPlan(
            step_id=self._step_id,
            passes=(Pass(segments=tuple(segments)),),
            admissions=tuple(admissions),
        )
        self.run(plan)

    def _fill(self, count: int, block_tokens: int) -> None:
        """Compute the first block of the first sequence and copy it over all others.

        Pages that were never written are one physical page of zeros, which caches hold.
        """
        tokens = min(block_tokens, self._columns * block_tokens)
        self.run(self.plan(StepShape(batch_size=1, num_tokens=tokens, context=0)))
        for group in range(self._num_groups):
            block = self._executor.export_blocks(group, [0], ModelRole.TARGET)
            for other in range(1, count * self._columns):
                self._executor.import_blocks(group, [other], block, ModelRole.TARGET)
