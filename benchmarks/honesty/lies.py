"""Measurements that lie on purpose: predictions must not agree with them."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import msgspec

from ridgeline.bench.calibration import SHAPES, STEPS, BenchModel, Config, build, price_of, shape
from ridgeline.bench.step_timing import StepShape, StepTimer, StepTimes
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.predict import StepPredictor

CACHED, HONEST = "cache-resident weights", "nothing planted"
AGAIN = "steps of the calibration"  # measured in turns with the lies: what the machine does now
_STEPS = tuple(
    StepShape(batch_size=b, num_tokens=1, context=c) for b, c in ((1, 64), (2, 200), (4, 64))
)
_SMALL = shape(512, 1536, 1, 8, 8, 512)  # 15 MB in float32: a cache that is shared holds it
_SMALL_STEP = StepShape(batch_size=1, num_tokens=1, context=16)
_STEPS_AGAIN = tuple(each for each in STEPS if each.phase == "decode")[:3]
_VISITS = 5
_LARGE, _FORMAT = "wide", "bfloat16"
_CACHED_SHAPE = "cached"
_CONFIGS: Mapping[str, Config] = {_CACHED_SHAPE: _SMALL, _LARGE: SHAPES[_LARGE]}


def measure_lies(executor: str) -> dict[str, tuple[StepTimes, ...]]:
    """Weights that lie in cache, a core fewer, an executor that sleeps; honest steps; and `AGAIN`.

    In turns, so that a machine that changes its speed changes it for all of them.
    """
    small = build(_CACHED_SHAPE, _SMALL, "float32", executor=executor)
    large = build(_LARGE, SHAPES[_LARGE], _FORMAT, executor=executor)
    timer = StepTimer(large.executor, [*_STEPS, *_STEPS_AGAIN])
    planted = (
        _Planted(CACHED, small, StepTimer(small.executor, [_SMALL_STEP]), (_SMALL_STEP,)),
        _Planted("a core removed", large, timer, _STEPS, _one_core_less),
        _Planted("a slowed kernel", large, _Sleeping(timer), _STEPS),
        _Planted(HONEST, large, timer, _STEPS),
        _Planted(AGAIN, large, timer, _STEPS_AGAIN),
    )
    for _ in range(_VISITS):
        for each in planted:
            each.visit()
    for model in (small, large):
        model.executor.close()
    return {each.name: each.times() for each in planted}


def judge_lies(
    lies: Mapping[str, Sequence[StepTimes]], calibration: Calibration, *, drift: float = 1.0
) -> dict[str, dict[str, Any]]:
    """What was flagged: measured seconds outside the interval that holds 80 % of them.

    Of weights in a cache it is claimed that they come from main memory: those are too fast.
    The machine took ``drift`` times the seconds of the calibration when the honest steps were
    measured; what is planted is judged beside those, which were measured with it.
    """
    memory = replace(calibration.ceilings, levels=calibration.ceilings.levels[-1:])
    no_caches = msgspec.structs.replace(calibration, ceilings=memory)
    spread, found = calibration.spreads["decode"], {}
    ratios = {
        name: median(
            each.seconds / predicted_s(each, no_caches if name == CACHED else calibration)
            for each in times
        )
        for name, times in lies.items()
        if name != AGAIN
    }
    control = ratios.get(HONEST, drift)
    for name, measured in ratios.items():
        ratio = measured / (drift if name == HONEST else control)
        flagged = ratio < spread.low or (name != CACHED and ratio > spread.high)
        found[name] = {"flagged": flagged, "ratio": ratio, "held": flagged != (name == HONEST)}
    return found


def predicted_s(each: StepTimes, calibration: Calibration) -> float:
    """Seconds of the step, as the calibration has it."""
    model = price_of(_CONFIGS[each.shape], each.format, executor=calibration.executor)
    predictor = StepPredictor({ModelRole.TARGET: model}, calibration)
    return predictor.batch_seconds(each.step.batch)


class _Planted:
    """One lie, or none: steps of a model, visited under the conditions of ``during``."""

    def __init__(
        self,
        name: str,
        model: BenchModel,
        timer: StepTimer,
        steps: Sequence[StepShape],
        during: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.name = name
        self._model, self._timer, self._during = model, timer, during
        self._visits: dict[StepShape, list[tuple[float, ...]]] = {step: [] for step in steps}

    def visit(self) -> None:
        with self._during():
            for step, visits in self._visits.items():
                visits.append(self._timer.visit(step))

    def times(self) -> tuple[StepTimes, ...]:
        return tuple(
            StepTimes(
                shape=self._model.name,
                format=self._model.format,
                step=step,
                visits_s=tuple(visits),
            )
            for step, visits in self._visits.items()
        )


class _Sleeping(StepTimer):
    """A timer of an executor that takes twice as long."""

    def __init__(self, timer: StepTimer) -> None:
        self.__dict__.update(timer.__dict__)

    def run(self, plan: StepPlan) -> float:
        start = time.perf_counter()
        super().run(plan)
        time.sleep(time.perf_counter() - start)
        return time.perf_counter() - start


@contextmanager
def _one_core_less() -> Iterator[None]:
    """All threads of this process on all cores but one (on one, of two)."""
    tasks = [int(task) for task in os.listdir("/proc/self/task")]
    before = os.sched_getaffinity(0)
    fewer = set(sorted(before)[1:]) or before
    try:
        for task in tasks:
            os.sched_setaffinity(task, fewer)
        yield
    finally:
        for task in tasks:
            os.sched_setaffinity(task, before)
