"""Checks of the checker: the same thing measured twice, and measurements that lie on purpose."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from ridgeline.bench.calibration import Config, build, shape
from ridgeline.bench.step_timing import StepShape, StepTimer
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.predict import StepPredictor
from ridgeline.roofline.price import pass_work

_STEPS = tuple(
    StepShape(batch_size=b, num_tokens=1, context=c) for b, c in ((1, 64), (2, 200), (4, 64))
)
_CACHED = shape(512, 1408, 2, 8, 8, 1024)  # 21 MB in float32
_WINDOW = 0.05


def false_wins(timer: StepTimer, steps: Sequence[StepShape], rounds: int = 3) -> list[bool]:
    """Whether two measurements of one thing look like a win of 5 %, for each step and round."""
    wins = []
    for step in steps:
        for _ in range(rounds):
            one, other = timer.measure(step), timer.measure(step)
            wins.append(abs(one / other - 1.0) > _WINDOW)
    return wins


def is_flagged(timer: StepTimer, predictor: StepPredictor) -> tuple[bool, float]:
    """Whether steps lie outside the interval that holds 80 % of them; and measured ÷ predicted."""
    ratios = []
    for step in _STEPS:
        predicted = predictor.batch_seconds(make_batch(step.ranges))
        ratios.append(timer.measure(step) / predicted)
    spread, ratio = predictor.calibration.spreads["decode"], median(ratios)
    return not spread.low <= ratio <= spread.high, ratio


def planted_lies(
    calibration: Calibration, executor: str, model_shape: Config
) -> dict[str, dict[str, Any]]:
    """Weights that lie in cache, a core fewer, a kernel that sleeps: each must be flagged.

    The first claims a share of main memory's bandwidth for a model that caches hold: that is over
    100 %. The others leave the interval of the prediction.
    """
    found = {"cache-resident weights": _cached(calibration, executor)}
    large = build("wide", model_shape, "bfloat16", executor=executor)
    predictor = StepPredictor({ModelRole.TARGET: large.priced}, calibration)
    timer = StepTimer(large.executor, max_batch=4, max_context=256)
    with _one_core_less():
        found["a core removed"] = _entry(*is_flagged(timer, predictor))
    found["a slowed kernel"] = _entry(*is_flagged(_Sleeping(timer), predictor))
    honest, ratio = is_flagged(timer, predictor)
    found["nothing planted"] = {"flagged": honest, "ratio": ratio, "held": not honest}
    large.executor.close()
    return found


def _cached(calibration: Calibration, executor: str) -> dict[str, Any]:
    """The share of main memory's bandwidth that weights in cache seem to reach."""
    small = build("small", _CACHED, "float32", executor=executor)
    timer = StepTimer(small.executor, max_batch=1, max_context=64)
    step = StepShape(batch_size=1, num_tokens=1, context=16)
    moved = pass_work(small.priced, make_batch(step.ranges)).num_bytes
    share = moved / timer.measure(step) / calibration.ceilings.memory.bytes_per_s
    small.executor.close()
    return _entry(share > 1.0, share)


def _entry(flagged: bool, ratio: float) -> dict[str, Any]:
    return {"flagged": flagged, "ratio": ratio, "held": flagged}


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
