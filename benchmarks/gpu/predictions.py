"""How well the roofline predicts steps of this machine, once it is fitted to others of them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from benchmarks.gpu.steps import StepTime
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.features import pass_terms
from ridgeline.roofline.fitting import Sample, fit, held_out_errors

_LEAST_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Medians of |1 − predicted ÷ measured| by phase, of steps whose shape, or whose format, the
    fit has not seen."""

    median_errors: dict[str, float]
    counts: dict[str, int]
    coefficients: dict[str, float]

    def text(self) -> str:
        """One line."""
        parts = [
            f"{phase} {error:.0%} ({self.counts[phase]})"
            for phase, error in self.median_errors.items()
        ]
        return f"predictions of steps that were not fitted, median error: {', '.join(parts)}"


def predictions(steps: Sequence[StepTime], ceilings: Ceilings) -> Predictions | None:
    """``None`` if too few steps were measured."""
    if len(steps) < _LEAST_SAMPLES:
        return None
    samples = [
        Sample(
            terms=pass_terms(step.model, step.rows, ceilings),
            seconds=step.wall_seconds,
            shape=step.shape,
            format=step.format,
            phase=step.phase,
        )
        for step in steps
    ]
    errors = held_out_errors(samples)
    return Predictions(
        median_errors={
            phase: statistics.median(abs(1 - exp(-log)) for log in logs)
            for phase, logs in errors.items()
        },
        counts={phase: len(logs) for phase, logs in errors.items()},
        coefficients=fit(samples),
    )
