"""`Recorder`: what an executor's steps took, collected as they run, and the `Recording` of them."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.core.recorded_step import OpSpan, RecordedPass, RecordedStep

# Of some forward passes in a row, one for each step of a replay.
Spans = Callable[[], Sequence[tuple[OpSpan, ...]]]
_NotedPass = tuple[ModelRole, int, Spans]


@dataclass(frozen=True, slots=True)
class Recording:
    """Steps that were recorded: plan, begin, end, and passes that still have to be read."""

    noted: Sequence[tuple[StepPlan, float, float, Sequence[_NotedPass]]]

    def steps(self) -> tuple[RecordedStep, ...]:
        """Made here, once the steps are over, so that it costs them nothing."""
        return tuple(
            RecordedStep(plan=plan, begin_s=begin_s, end_s=end_s, passes=_passes(passes))
            for plan, begin_s, end_s, passes in self.noted
        )


class Recorder:
    """Of ``num_steps`` steps; lives on the executor's thread. ``recorded`` gets what came of it."""

    def __init__(self, num_steps: int) -> None:
        self.recorded: Future[Recording] = Future()
        self.pass_index = 0  # of the pass that runs
        self._num_steps = num_steps
        self._steps: list[tuple[StepPlan, float, float, list[_NotedPass]]] = []
        self._passes: list[_NotedPass] = []
        self._begin_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._passes = []
        self._begin_s = time.perf_counter()

    def add(self, role: ModelRole, spans: Spans) -> None:
        """Some of the running pass's forward passes are done."""
        self._passes.append((role, self.pass_index, spans))

    def end(self, plan: StepPlan) -> bool:
        """The step is done; whether it was the last to be recorded."""
        self._steps.append((plan, self._begin_s, time.perf_counter(), self._passes))
        return len(self._steps) >= self._num_steps

    def finish(self) -> None:
        """Give out what there is."""
        self.recorded.set_result(Recording(self._steps))


def _passes(noted: Sequence[_NotedPass]) -> tuple[RecordedPass, ...]:
    found: list[RecordedPass] = []
    for role, index, spans in noted:
        for each in spans():
            step = sum(one.pass_index == index for one in found)
            found.append(RecordedPass(role=role, pass_index=index, step=step, spans=each))
    return tuple(found)
