"""Errors, coverage, baselines and speed-ups, from predictions and measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.bench.step_timing import StepShape, StepTimes

NOISE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A prediction, made before anything was measured. ``baselines`` are seconds by name."""

    shape: str
    format: str
    step: StepShape
    predicted_s: float
    low_s: float
    high_s: float
    baselines: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"{self.shape} {self.format} {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A claim and what was measured."""

    claim: Claim
    measured_s: float

    @property
    def error(self) -> float:
        return abs(self.claim.predicted_s / self.measured_s - 1.0)

    @property
    def inside(self) -> bool:
        return self.claim.low_s <= self.measured_s <= self.claim.high_s


class Baselines:
    """Simpler predictors, fitted on the seconds of the same steps and what the roof allows them."""

    def __init__(self, roofs_s: Sequence[float], seconds: Sequence[float]) -> None:
        roofs, measured = np.array(roofs_s), np.array(seconds)
        self._constant = float(np.median(measured / roofs))
        design = np.stack([np.ones_like(roofs), roofs], axis=1) / measured[:, None]
        self._affine, *_ = np.linalg.lstsq(design, np.ones_like(roofs), rcond=None)

    def predict(self, roof_s: float) -> dict[str, float]:
        """Seconds by the bare roofline, by one efficiency for all, and by an affine fit of it."""
        return {
            "roofline": roof_s,
            "constant": self._constant * roof_s,
            "affine": float(self._affine[0] + self._affine[1] * roof_s),
        }


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Median, p90 and worst error and coverage by phase, against the bars; and the baselines'."""
    bars = {"decode": (0.08, 0.20), "prefill": (0.10, 0.25)}
    result: dict[str, Any] = {}
    for phase, (median_bar, p90_bar) in bars.items():
        chosen = [outcome for outcome in outcomes if outcome.claim.step.phase == phase]
        if not chosen:
            continue
        errors = np.array([outcome.error for outcome in chosen])
        worst = chosen[int(errors.argmax())]
        covered = float(np.mean([outcome.inside for outcome in chosen]))
        median, p90 = float(np.median(errors)), float(np.quantile(errors, 0.9))
        others = {
            name: float(
                np.median([abs(o.claim.baselines[name] / o.measured_s - 1.0) for o in chosen])
            )
            for name in chosen[0].claim.baselines
        }
        result[phase] = {
            "count": len(chosen),
            "median": median,
            "p90": p90,
            "worst": float(errors.max()),
            "worst_case": worst.claim.name,
            "covered": covered,
            "baselines": others,
            "held": {
                "median": median <= median_bar,
                "p90": p90 <= p90_bar,
                "coverage": 0.7 <= covered <= 0.9,
                "half of the roofline's error": median <= others["roofline"] / 2,
                "better than one efficiency": median < others["constant"],
                "better than an affine fit": median < others["affine"],
            },
        }
    return result


def speed_ups(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of each change of format, on one shape and step: predicted against measured."""
    by_step: dict[tuple[str, StepShape], list[Outcome]] = {}
    for outcome in outcomes:
        by_step.setdefault((outcome.claim.shape, outcome.claim.step), []).append(outcome)
    errors, signs = [], []
    for group in by_step.values():
        for index, first in enumerate(group):
            for second in group[index + 1 :]:
                measured = first.measured_s / second.measured_s
                predicted = first.claim.predicted_s / second.claim.predicted_s
                errors.append(abs(predicted / measured - 1.0))
                if abs(measured - 1.0) > NOISE:
                    signs.append((measured > 1.0) == (predicted > 1.0))
    if not errors:
        return {}
    return {
        "count": len(errors),
        "median": float(np.median(errors)),
        "sign_right": float(np.mean(signs)) if signs else None,
        "held": {
            "median": float(np.median(errors)) <= 0.10,
            "sign": all(signs),
        },
    }


def false_wins(pairs: Sequence[tuple[StepTimes, StepTimes]]) -> dict[str, Any]:
    """Of one thing measured twice: how often the two look different."""
    wins = sum(is_win(one, other) for one, other in pairs)
    return {"count": len(pairs), "false": wins, "held": wins <= 0.05 * len(pairs)}


def is_win(one: StepTimes, other: StepTimes) -> bool:
    """Whether one is faster: by more than 5 %, and no visit of it as slow as one of the other."""
    slow, fast = sorted((one, other), key=lambda each: each.seconds, reverse=True)
    apart = max(fast.medians_s) < min(slow.medians_s)
    return apart and slow.seconds / fast.seconds > 1.0 + NOISE
