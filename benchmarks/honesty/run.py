"""The run: calibrate, predict, write the predictions down, measure."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.honesty import cases
from benchmarks.honesty.lies import measure_lies
from benchmarks.honesty.measured import SCHEMA, Measurements, ModelTimes, TrafficTimes
from benchmarks.honesty.report import (
    baselines_of,
    calibration_of,
    calibration_samples,
    make_claims,
    predicted_ttft,
    priced,
)
from benchmarks.honesty.scoring import Baselines
from benchmarks.honesty.traffic import make_trace, measured_ttfts_s
from ridgeline.bench.calibration import (
    SHAPES,
    STEPS,
    BenchModel,
    Rates,
    build,
    host_seconds,
    measure_in_turns,
    measure_roof,
    rates_now,
    short_steps,
    with_best,
)
from ridgeline.bench.conditions import Watch
from ridgeline.bench.step_timing import StepShape, StepTimer, StepTimes
from ridgeline.roofline.calibration import Calibration
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.storage import write_json

_LOADS = (0.5, 0.8)
_TRAFFIC_VISITS = 3
_TRAFFIC_MODEL = ("tall", "bfloat16")
_STEPS_AGAIN = tuple(
    each for phase in ("decode", "prefill") for each in [s for s in STEPS if s.phase == phase][:3]
)
_ROUNDS = 8


class HonestyRun:
    """Measures, and writes each prediction to ``predictions`` before what it is about.

    ``quick`` takes few steps, to try the script.
    """

    def __init__(self, executor: str, predictions: Path, *, quick: bool = False) -> None:
        self._executor, self._quick = executor, quick
        self._path = predictions
        self._rates: list[Rates] = []
        self._written: dict[str, Any] = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "claims": [],
            "ttft_s": [],
        }

    def measure(self) -> Measurements:
        """Everything, some ten minutes on two cores."""
        started, watch = time.monotonic(), Watch()
        ceilings = measure_roof(self._executor)
        host_step_s, host_segment_s = host_seconds()
        calibration_times = self._calibration(ceilings)
        measured = Measurements(
            schema=SCHEMA,
            created=self._written["created"],
            executor=self._executor,
            ceilings=with_best(ceilings, self._rates),
            host_step_s=host_step_s,
            host_segment_s=host_segment_s,
            calibration=calibration_times,
        )
        samples = calibration_samples(measured)
        calibration, baselines = calibration_of(measured, samples), baselines_of(measured)
        tests, repeated = self._tests(calibration, baselines)
        _say("planted lies")
        lies = measure_lies(self._executor)
        traffic = self._traffic(calibration)
        return msgspec.structs.replace(
            measured,
            tests=tests,
            repeated=repeated,
            lies=lies,
            traffic=traffic,
            memory_rates=tuple(each.memory for each in self._rates),
            seconds=time.monotonic() - started,
            conditions=dict(watch.conditions(threads=1)),
        )

    def _calibration(self, ceilings: Ceilings) -> tuple[ModelTimes, ...]:
        formats = cases.CALIBRATED_FORMATS[self._executor]
        _say("calibrating")
        names = [(name, form) for form in formats[: self._most(1)] for name in SHAPES]
        return self._measure([(each, STEPS[:: self._every(3)]) for each in names], ceilings)

    def _tests(
        self, calibration: Calibration, baselines: Baselines
    ) -> tuple[tuple[ModelTimes, ...], tuple[ModelTimes, ...]]:
        """Steps that are tested, and some of the calibration's, measured in turns."""
        models = cases.tested_models(self._executor)[: self._most(2)]
        steps = cases.TEST_STEPS[:: self._every(5)]
        for shape, form in models:
            few = short_steps(priced(self._executor, shape, form), calibration.ceilings, steps)
            claims = make_claims(shape, form, few, calibration, baselines)
            self._written["claims"] += [asdict(claim) for claim in claims]
        write_json(self._path, self._written)
        _say("measuring what was predicted")
        tested = [(model, steps) for model in models]
        again = cases.REPEATED_STEPS[:: self._every(5)]
        repeated = [(model, again) for model in cases.repeated_models(self._executor)]
        times = self._measure([*tested, *repeated], calibration.ceilings)
        return times[: len(models)], times[len(models) :]

    def _measure(
        self,
        planned_steps: Sequence[tuple[tuple[str, str], Sequence[StepShape]]],
        ceilings: Ceilings,
    ) -> tuple[ModelTimes, ...]:
        """Steps of models by (shape, format)."""
        models = [self._build(shape, form) for (shape, form), _ in planned_steps]
        planned = [
            (model, short_steps(model.priced, ceilings, steps))
            for model, (_, steps) in zip(models, planned_steps, strict=True)
        ]
        measured = measure_in_turns(planned, rounds=_ROUNDS, between=self._note_rates)
        return tuple(
            ModelTimes(shape=model.name, format=model.format, times=tuple(times))
            for model, times in zip(models, measured, strict=True)
        )

    def _note_rates(self) -> None:
        self._rates.append(rates_now(self._executor))

    def _most(self, quick: int) -> int | None:
        return quick if self._quick else None

    def _every(self, quick: int) -> int:
        return quick if self._quick else 1

    def _traffic(self, calibration: Calibration) -> tuple[TrafficTimes, ...]:
        shape, form = _TRAFFIC_MODEL
        found = []
        again = _Again(self._executor)
        for load in _LOADS:
            _say(f"traffic at {load:.0%} load")
            trace = make_trace(
                priced(self._executor, shape, form),
                calibration,
                load=load,
                num_requests=6 if self._quick else 60,
            )
            asked = TrafficTimes(
                load=load, shape=shape, format=form, arrivals=tuple(trace), visits_s=()
            )
            self._written["ttft_s"].append(predicted_ttft(asked, calibration))
            write_json(self._path, self._written)
            visits = []
            for _ in range(1 if self._quick else _TRAFFIC_VISITS):
                again.visit()
                model = self._build(shape, form)
                visits.append(measured_ttfts_s(model, calibration, asked.arrivals))
                model.executor.close()
            again.visit()
            asked = msgspec.structs.replace(asked, visits_s=tuple(visits), again=again.take())
            found.append(asked)
        again.close()
        return tuple(found)

    def _build(self, shape: str, form: str) -> BenchModel:
        return build(shape, cases.ALL_SHAPES[shape], form, executor=self._executor)


class _Again:
    """Steps of the calibration, measured again: what the machine does now."""

    def __init__(self, executor: str) -> None:
        shape, form = cases.repeated_models(executor)[0]
        self._model = build(shape, cases.ALL_SHAPES[shape], form, executor=executor)
        self._timer = StepTimer(self._model.executor, _STEPS_AGAIN)
        self._visits: dict[StepShape, list[tuple[float, ...]]] = {}

    def visit(self) -> None:
        for step in _STEPS_AGAIN:
            self._visits.setdefault(step, []).append(self._timer.visit(step))

    def take(self) -> ModelTimes:
        """What the visits since the last call measured."""
        shape, form = self._model.name, self._model.format
        times = tuple(
            StepTimes(shape=shape, format=form, step=step, visits_s=tuple(visits))
            for step, visits in self._visits.items()
        )
        self._visits = {}
        return ModelTimes(shape=shape, format=form, times=times)

    def close(self) -> None:
        self._model.executor.close()


def _say(text: str) -> None:
    print(f"honesty: {text}", file=sys.stderr, flush=True)
