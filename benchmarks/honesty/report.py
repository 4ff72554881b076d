"""From measurements to a report: the fit, its predictions, and how far off they are."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.honesty import cases
from benchmarks.honesty.lies import AGAIN, judge_lies
from benchmarks.honesty.measured import Measurements, TrafficTimes
from benchmarks.honesty.scoring import (
    Baselines,
    Claim,
    Outcome,
    false_wins,
    speed_ups,
    summarise,
)
from benchmarks.honesty.traffic import predicted_ttft_s, ttft_entry
from ridgeline.bench.calibration import SMALL, price_of, samples_of
from ridgeline.bench.step_timing import StepShape, StepTimes
from ridgeline.core.plan import ModelRole
from ridgeline.executors import executor_traits
from ridgeline.roofline import PricedModel
from ridgeline.roofline.calibration import Calibration, calibrate
from ridgeline.roofline.features import roof_seconds
from ridgeline.roofline.fitting import Sample
from ridgeline.roofline.predict import StepPredictor


def calibration_samples(measured: Measurements) -> list[Sample]:
    """What the fit sees: the calibration's steps alone."""
    samples: list[Sample] = []
    for each in measured.calibration:
        model = priced(measured.executor, each.shape, each.format)
        samples += samples_of(each.times, model, measured.ceilings)
    return samples


def baselines_of(measured: Measurements) -> Baselines:
    """The simpler predictors, fitted on the calibration's steps."""
    roofs, seconds = [], []
    for each in measured.calibration:
        model = priced(measured.executor, each.shape, each.format)
        for times in each.times:
            roofs.append(roof_seconds(model, times.step.batch, measured.ceilings))
            seconds.append(times.seconds)
    return Baselines(roofs, seconds)


def calibration_of(measured: Measurements, samples: Sequence[Sample]) -> Calibration:
    """The fit."""
    return calibrate(
        samples,
        measured.ceilings,
        executor=measured.executor,
        dense_attention=executor_traits(measured.executor).dense_attention,
        host_step_s=measured.host_step_s,
        host_segment_s=measured.host_segment_s,
        needed=(SMALL,),
    )


def priced(executor: str, shape: str, form: str) -> PricedModel:
    """A tested or calibrated model as the roofline prices it."""
    return price_of(cases.ALL_SHAPES[shape], form, executor=executor)


def make_claims(
    shape: str,
    form: str,
    steps: Sequence[StepShape],
    calibration: Calibration,
    baselines: Baselines,
) -> list[Claim]:
    """Predictions for some steps of a model."""
    model = priced(calibration.executor, shape, form)
    predictor = StepPredictor({ModelRole.TARGET: model}, calibration)
    claims = []
    for step in steps:
        batch = step.batch
        interval = predictor.interval(predictor.batch_seconds(batch), step.phase)
        claims.append(
            Claim(
                shape=shape,
                format=form,
                step=step,
                predicted_s=interval.seconds,
                low_s=interval.low_s,
                high_s=interval.high_s,
                baselines=baselines.predict(roof_seconds(model, batch, calibration.ceilings)),
            )
        )
    return claims


def predicted_ttft(
    times: TrafficTimes, calibration: Calibration, drift: Mapping[str, float] | None = None
) -> float:
    """The simulation's mean time to first token on a trace that the real engine has answered."""
    model = priced(calibration.executor, times.shape, times.format)
    return predicted_ttft_s(model, calibration, times.arrivals, drift)


def report(measured: Measurements) -> dict[str, Any]:
    """Everything that the page shows, as plain values."""
    samples = calibration_samples(measured)
    calibration, baselines = calibration_of(measured, samples), baselines_of(measured)
    outcomes: list[Outcome] = []
    pairs: list[tuple[StepTimes, StepTimes]] = []
    for each in measured.tests:
        steps = [times.step for times in each.times]
        claims = make_claims(each.shape, each.format, steps, calibration, baselines)
        outcomes += [
            Outcome(claim=claim, measured_s=times.seconds)
            for claim, times in zip(claims, each.times, strict=True)
        ]
        pairs += map(StepTimes.halves, each.times)
    before = _seconds_before(measured)
    drift = _drift(before, [times for each in measured.repeated for times in each.times])
    beside_lies = _drift(before, measured.lies.get(AGAIN, ())) or drift
    return {
        "created": measured.created,
        "executor": measured.executor,
        "machine": measured.ceilings.name,
        "seconds": measured.seconds,
        "conditions": measured.conditions,
        "contended": bool(measured.conditions.get("contended")),
        "calibrated": {
            "shapes": sorted({sample.shape for sample in samples}),
            "formats": sorted({sample.format for sample in samples}),
            "count": len(samples),
            "coefficients": calibration.coefficients,
        },
        "unseen": {
            "shapes": list(cases.UNSEEN_SHAPES),
            "format": cases.UNSEEN_FORMAT[measured.executor],
        },
        "count": len(outcomes),
        "steps": summarise(outcomes),
        "drift": drift,
        "corrected": summarise([_corrected(each, drift) for each in outcomes]) if drift else {},
        "by_model": _by_model(outcomes),
        "by_kind": _by_kind(outcomes),
        "speed_ups": speed_ups(outcomes),
        "ttft": [_ttft(each, calibration, before) for each in measured.traffic],
        "a_a": false_wins(pairs),
        "lies": judge_lies(measured.lies, calibration, drift=beside_lies.get("decode", 1.0)),
        "memory": {
            "claimed": measured.ceilings.memory.bytes_per_s,
            "rounds": list(measured.memory_rates),
        },
        "outcomes": [_row(outcome) for outcome in outcomes],
    }


_Key = tuple[str, str, StepShape]


def _seconds_before(measured: Measurements) -> dict[_Key, float]:
    """Those of the calibration's steps."""
    return {
        (each.shape, each.format, times.step): times.seconds
        for each in measured.calibration
        for times in each.times
    }


def _drift(before: Mapping[_Key, float], again: Sequence[StepTimes]) -> dict[str, float]:
    """By phase, the seconds of steps that were measured again ÷ those of the calibration."""
    ratios: dict[str, list[float]] = {}
    for times in again:
        first = before.get((times.shape, times.format, times.step))
        if first is not None:
            ratios.setdefault(times.step.phase, []).append(times.seconds / first)
    return {phase: median(found) for phase, found in ratios.items()}


def _ttft(
    times: TrafficTimes, calibration: Calibration, before: Mapping[_Key, float]
) -> dict[str, Any]:
    drift = _drift(before, times.again.times) if times.again else {}
    corrected_s = predicted_ttft(times, calibration, drift) if drift else None
    return ttft_entry(times, predicted_ttft(times, calibration), corrected_s)


def _corrected(outcome: Outcome, drift: Mapping[str, float]) -> Outcome:
    """With all that was predicted, the baselines' too, at the machine's speed during the tests."""
    claim, factor = outcome.claim, drift[outcome.claim.step.phase]
    at_that_speed = replace(
        claim,
        predicted_s=claim.predicted_s * factor,
        low_s=claim.low_s * factor,
        high_s=claim.high_s * factor,
        baselines={name: seconds * factor for name, seconds in claim.baselines.items()},
    )
    return replace(outcome, claim=at_that_speed)


def _by_model(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The summary of each model by itself."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(f"{outcome.claim.shape} {outcome.claim.format}", []).append(outcome)
    return {name: summarise(group) for name, group in groups.items()}


def _by_kind(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Median and worst error, and coverage, of steps that are more than their phase."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        step = outcome.claim.step
        if step.kind != step.phase:
            groups.setdefault(step.kind, []).append(outcome)
    return {
        kind: {
            "count": len(group),
            "median": median(each.error for each in group),
            "worst": max(each.error for each in group),
            "covered": sum(each.inside for each in group) / len(group),
        }
        for kind, group in groups.items()
    }


def _row(outcome: Outcome) -> Mapping[str, Any]:
    claim = outcome.claim
    return {
        "case": claim.name,
        "phase": claim.step.phase,
        "predicted_s": claim.predicted_s,
        "low_s": claim.low_s,
        "high_s": claim.high_s,
        "measured_s": outcome.measured_s,
        "error": outcome.error,
        "baselines": dict(claim.baselines),
    }
