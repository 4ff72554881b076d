"""The run: calibrate, predict, write the predictions down, measure, compare."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ridgeline.bench.calibration import (
    SHAPES,
    STEPS,
    build,
    measure_roof,
    measure_samples,
    memory_rate,
)
from ridgeline.bench.conditions import Watch
from ridgeline.bench.honesty import cases
from ridgeline.bench.honesty.lies import false_wins, planted_lies
from ridgeline.bench.honesty.scoring import Baselines, Claim, Outcome, speed_ups, summarise
from ridgeline.bench.honesty.traffic import (
    make_trace,
    measured_ttft_s,
    predicted_ttft_s,
    ttft_entry,
)
from ridgeline.bench.step_timing import StepShape, StepTimer
from ridgeline.core.plan import ModelRole
from ridgeline.roofline import PricedModel
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.calibration import Calibration, calibrate
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.fitting import Sample
from ridgeline.roofline.predict import StepPredictor
from ridgeline.roofline.storage import write_json

_LONG_S = 0.5  # steps whose roof alone takes longer are left out
_LOADS = (0.4, 0.7)


def run(executor: str, folder: Path, *, quick: bool = False) -> dict[str, Any]:
    """The whole run, as plain values. ``quick`` takes few steps, to try the script."""
    started, watch = time.monotonic(), Watch()
    created = datetime.now(UTC).isoformat(timespec="seconds")
    ceilings = measure_roof(executor)
    samples = _calibration_samples(executor, ceilings, quick=quick)
    calibration = calibrate(
        samples, ceilings, executor=executor, dense_attention=executor == "reference"
    )
    claims = _claims(executor, calibration, Baselines(samples), quick=quick)
    path = folder / f"honesty-{executor}-{created[:10]}-predictions.json"
    write_json(path, {"created": created, "claims": [asdict(claim) for claim in claims]})
    outcomes, wins = _measure(executor, claims)
    _say("planted lies")
    lies = planted_lies(calibration, executor, SHAPES["wide"])
    ttft = _ttft(executor, calibration, num_requests=6 if quick else 40)
    drift = memory_rate(executor) / ceilings.memory.bytes_per_s
    conditions = watch.conditions(threads=1)
    return {
        "created": created,
        "executor": executor,
        "machine": ceilings.name,
        "seconds": time.monotonic() - started,
        "conditions": dict(conditions),
        "contended": bool(conditions["contended"]),
        "calibrated": {
            "shapes": sorted({sample.shape for sample in samples}),
            "formats": sorted({sample.format for sample in samples}),
        },
        "unseen": {
            "shapes": list(cases.UNSEEN_SHAPES),
            "format": cases.UNSEEN_FORMAT[executor],
        },
        "count": len(outcomes),
        "steps": summarise(outcomes),
        "speed_ups": speed_ups(outcomes),
        "ttft": ttft,
        "a_a": {"count": len(wins), "false": sum(wins), "held": sum(wins) <= 0.05 * len(wins)},
        "lies": lies,
        "ceiling_drift": drift,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def _say(text: str) -> None:
    print(f"honesty: {text}", file=sys.stderr, flush=True)


def _calibration_samples(executor: str, ceilings: Ceilings, *, quick: bool) -> list[Sample]:
    formats = cases.CALIBRATED_FORMATS[executor]
    steps, samples = STEPS[::3] if quick else STEPS, []
    for form in formats[:1] if quick else formats:
        for name, config in SHAPES.items():
            _say(f"calibrating on {name} in {form}")
            model = build(name, config, form, executor=executor)
            samples += measure_samples(model, ceilings, steps)
    return samples


def _claims(
    executor: str, calibration: Calibration, baselines: Baselines, *, quick: bool
) -> list[Claim]:
    """Predictions of every test case that is not too long."""
    models = cases.tested_models(executor)
    steps = cases.TEST_STEPS[::5] if quick else cases.TEST_STEPS
    found = []
    for shape, form in models[:2] if quick else models:
        priced = _priced(executor, shape, form)
        predictor = StepPredictor({ModelRole.TARGET: priced}, calibration)
        claims = (_claim(shape, form, step, predictor, baselines) for step in steps)
        found += [claim for claim in claims if claim.baselines["roofline"] < _LONG_S]
    return found


def _priced(executor: str, shape: str, form: str) -> PricedModel:
    """The model as it will be priced; its weights are made, and thrown away."""
    model = build(shape, cases.ALL_SHAPES[shape], form, executor=executor)
    model.executor.close()
    return model.priced


def _claim(
    shape: str, form: str, step: StepShape, predictor: StepPredictor, baselines: Baselines
) -> Claim:
    batch = make_batch(step.ranges)
    interval = predictor.interval(predictor.batch_seconds(batch), step.phase)
    return Claim(
        shape=shape,
        format=form,
        step=step,
        predicted_s=interval.seconds,
        low_s=interval.low_s,
        high_s=interval.high_s,
        baselines=baselines.predict(predictor.terms(batch)),
    )


def _measure(executor: str, claims: Sequence[Claim]) -> tuple[list[Outcome], list[bool]]:
    """Each claim's outcome, model by model; and the A/A wins of each model's first steps."""
    outcomes: list[Outcome] = []
    wins: list[bool] = []
    for shape, form in dict.fromkeys((claim.shape, claim.format) for claim in claims):
        _say(f"measuring {shape} in {form}")
        chosen = [claim for claim in claims if (claim.shape, claim.format) == (shape, form)]
        model = build(shape, cases.ALL_SHAPES[shape], form, executor=executor)
        timer = StepTimer(
            model.executor,
            max_batch=max(claim.step.batch_size for claim in chosen),
            max_context=max(claim.step.context + claim.step.num_tokens for claim in chosen),
        )
        for claim in chosen:
            outcomes.append(Outcome(claim=claim, measured_s=timer.measure(claim.step)))
        wins += false_wins(timer, [claim.step for claim in chosen[:3]], rounds=1)
        model.executor.close()
    return outcomes, wins


def _ttft(executor: str, calibration: Calibration, *, num_requests: int) -> list[dict[str, Any]]:
    entries = []
    for load in _LOADS:
        _say(f"traffic at {load:.0%} load")
        model = build("tall", cases.ALL_SHAPES["tall"], "bfloat16", executor=executor)
        trace = make_trace(model, calibration, load=load, num_requests=num_requests)
        predicted = predicted_ttft_s(model, calibration, trace)
        entries.append(ttft_entry(load, predicted, measured_ttft_s(model, trace)))
        model.executor.close()
    return entries
