"""Seconds of single steps of an executor, by hand-written plans: no scheduler, no requests."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from statistics import median_low

from ridgeline.core.plan import ModelRole, Outputs, StepPlan
from ridgeline.core.plan_maker import PlanMaker
from ridgeline.core.protocols import Executor
from ridgeline.core.rounding import ceil_div
from ridgeline.roofline.batch import BatchShape, make_batch

_BESIDE = 300  # tokens of context of decodes beside others
_VISIT_S = 0.08
_LEAST_REPEATS, _MOST_REPEATS = 3, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """``batch_size`` segments that compute ``num_tokens`` each, after ``context`` others, the last
    ``drafts`` of them drafts; and ``decodes`` further sequences that compute one token each."""

    batch_size: int
    num_tokens: int
    context: int
    drafts: int = 0
    decodes: int = 0

    @property
    def phase(self) -> str:
        return "prefill" if self.num_tokens - self.drafts > 1 else "decode"

    @property
    def kind(self) -> str:
        """The phase, or what more the step is."""
        return "mixed" if self.decodes else "verification" if self.drafts else self.phase

    @property
    def ranges(self) -> list[tuple[int, int]]:
        first = (self.context, self.context + self.num_tokens)
        return [first] * self.batch_size + [(_BESIDE, _BESIDE + 1)] * self.decodes

    @property
    def batch(self) -> BatchShape:
        """As it is priced."""
        return make_batch(self.ranges, self.batch_size * (1 + self.drafts) + self.decodes)

    def __str__(self) -> str:
        drafts = f", {self.drafts} drafts" if self.drafts else ""
        beside = f" + {self.decodes}×1@{_BESIDE}" if self.decodes else ""
        return f"{self.batch_size}×{self.num_tokens}@{self.context}{drafts}{beside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A step of a model, by the names of its shape and format.

    ``visits_s`` are the seconds of a few repetitions, at several times that lie far apart.
    """

    shape: str
    format: str
    step: StepShape
    visits_s: tuple[tuple[float, ...], ...]

    @property
    def seconds(self) -> float:
        """The median of the fastest visit.

        Neighbours on the machine, and on its host, only ever add to a step, and for seconds at a
        time; what is predicted is the machine without them.
        """
        return min(self.medians_s)

    @property
    def medians_s(self) -> list[float]:
        """Of each visit."""
        return [median_low(visit) for visit in self.visits_s]

    def halves(self) -> tuple["StepTimes", "StepTimes"]:
        """Every other visit, and the rest: the same thing measured twice, in turn."""
        return (
            replace(self, visits_s=self.visits_s[::2]),
            replace(self, visits_s=self.visits_s[1::2]),
        )


class StepTimer:
    """Owns an executor's KV pool; each sequence has blocks of its own, filled with real K and V.

    A sequence has room for those of ``steps`` that need it.
    """

    def __init__(self, executor: Executor, steps: Sequence[StepShape]) -> None:
        self._executor = executor
        layout = executor.kv_layout()
        self._block_tokens, self._num_groups = layout.block_tokens, len(layout.groups)
        self._vocab_size = executor.spec().vocab_size
        stops = [[stop for _, stop in each.ranges] for each in steps]
        rooms = [max(column) for column in zip_longest(*stops, fillvalue=1)]
        columns = [ceil_div(room, layout.block_tokens) for room in rooms]
        self._num_blocks = sum(columns)
        states = () if layout.states is None else (len(rooms),)
        executor.allocate_kv([*[self._num_blocks] * self._num_groups, *states])
        self._plans = PlanMaker(self._num_groups, has_states=layout.states is not None)
        self._num_plans = 0
        self._admit(rooms, columns)
        self._fill()

    def plan(self, shape: StepShape) -> StepPlan:
        """A plan of this shape, with other tokens than the last: they go to other experts."""
        self._num_plans += 1
        return self._plans.plan(
            [
                self._plans.segment(
                    slot,
                    start,
                    self._tokens(slot, start, stop),
                    num_drafts=shape.drafts if slot < shape.batch_size else 0,
                )
                for slot, (start, stop) in enumerate(shape.ranges)
            ]
        )

    def visit(self, shape: StepShape) -> tuple[float, ...]:
        """Seconds from submission to result of some repetitions: three at least, after one that
        warms up unless it is long."""
        times = [self.run(self.plan(shape))]
        if times[0] < _VISIT_S / 2:
            times.clear()
        while len(times) < _LEAST_REPEATS or (sum(times) < _VISIT_S and len(times) < _MOST_REPEATS):
            times.append(self.run(self.plan(shape)))
        return tuple(times)

    def run(self, plan: StepPlan) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self._executor.submit(plan).result()
        return time.perf_counter() - start

    def _admit(self, rooms: Sequence[int], columns: Sequence[int]) -> None:
        """Admit the sequences with their whole block tables, by computing one token of each."""
        firsts = accumulate(columns, initial=0)
        segments = [
            self._plans.segment(
                slot,
                0,
                self._tokens(slot, 0, 1),
                blocks=range(first, first + count),
                outputs=Outputs(),
            )
            for slot, (first, count) in enumerate(zip(firsts, columns, strict=False))
        ]
        admissions = [
            self._plans.admission(slot, self._tokens(slot, 0, length))
            for slot, length in enumerate(rooms)
        ]
        self.run(self._plans.plan(segments, admissions=admissions))

    def _tokens(self, slot: int, start: int, stop: int) -> tuple[int, ...]:
        """Different ones, since equal tokens go to the same experts."""
        first = 31 * slot + 101 * self._num_plans
        return tuple((first + 7 * at) % self._vocab_size for at in range(start, stop))

    def _fill(self) -> None:
        """Compute the first block of the first sequence and copy it over all others.

        Pages that were never written are one physical page of zeros, which caches hold.
        """
        whole = StepShape(batch_size=1, num_tokens=self._block_tokens, context=0)
        self.run(self.plan(whole))
        for group in range(self._num_groups):
            block = self._executor.export_blocks(group, [0], ModelRole.TARGET)
            for other in range(1, self._num_blocks):
                self._executor.import_blocks(group, [other], block, ModelRole.TARGET)
