"""Fitting the coefficients of `features` to measured steps, and how far off the fit is.

Least squares on relative errors with coefficients bounded from below. Neighbouring buckets are
drawn towards each other, and formats to their mean. Repeated with weights 1/|error|, so that it is
the median that counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log

import numpy as np
import numpy.typing as npt

from ridgeline.roofline.features import STEP, Terms

_SMOOTH = 0.05  # weight of the difference between neighbouring buckets
_POOL = 0.02  # weight of the difference between a format's bucket and all formats'
_PRIOR = 0.01  # weight of slowness 1 where nothing was measured
_FASTEST = 0.7  # least slowness: no kernel beats the roof, but roofs are measured with some noise
_ROUNDS = 6
ANY = "any"  # stands for every format in the name of a coefficient

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A step that was measured. Samples of one ``shape`` and ``format`` are left out together when
    the error is estimated. ``phase`` is prefill or decode."""

    terms: Terms
    seconds: float
    shape: str
    format: str
    phase: str


def fit(samples: Sequence[Sample]) -> dict[str, float]:
    """Coefficients by name; those of ``any`` format stand in for formats never measured."""
    names = _names(samples)
    index = {name: i for i, name in enumerate(names)}
    design = np.zeros((len(samples), len(names)))
    for row, sample in enumerate(samples):
        for name, value in sample.terms.items():
            design[row, index[name]] = value / sample.seconds
    ties, tie_targets = _ties(names, index)
    scale = np.array([1.0 if "@" in name or name == "other" else 1e-4 for name in names])
    design = design * scale  # coefficients of counts are seconds, of the order of 1e-4
    lower = np.array([_FASTEST if "@" in name else 0.0 for name in names])
    weights = np.ones(len(samples))
    solution = np.ones(len(names))
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)[:, None]
        matrix = np.vstack([design * root, ties])
        target = np.concatenate([root[:, 0], tie_targets])
        solution = bounded_least_squares(matrix, target, lower)
        errors = np.abs(design @ solution - 1.0)
        weights = 1.0 / np.maximum(errors, 0.02) * 0.05
    return {name: float(value) for name, value in zip(names, solution * scale, strict=True)}


def predict(coefficients: Mapping[str, float], terms: Terms) -> float:
    """Seconds. A format that was never measured takes the coefficient of all formats."""
    total = 0.0
    for name, value in terms.items():
        coefficient = coefficients.get(name)
        if coefficient is None:
            coefficient = coefficients.get(pooled_name(name), 1.0)
        total += coefficient * value
    return total


def pooled_name(name: str) -> str:
    """``linear/bfloat16@64`` → ``linear/any@64``."""
    head, at, knot = name.partition("@")
    kind, slash, _ = head.partition("/")
    return f"{kind}/{ANY}{at}{knot}" if slash and kind != "attention" else name


def held_out_errors(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """log(measured ÷ predicted) by phase, each sample predicted by a fit without its shape, and by
    one without its format where there are others."""
    errors: dict[str, list[float]] = {}
    for attribute in ("shape", "format"):
        values = {getattr(sample, attribute) for sample in samples}
        if len(values) < 2:
            continue
        for value in sorted(values):
            kept = [s for s in samples if getattr(s, attribute) != value]
            coefficients = fit(kept)
            for sample in samples:
                if getattr(sample, attribute) == value:
                    error = log(sample.seconds / predict(coefficients, sample.terms))
                    errors.setdefault(sample.phase, []).append(error)
    if not errors:
        coefficients = fit(samples)
        for sample in samples:
            error = log(sample.seconds / predict(coefficients, sample.terms))
            errors.setdefault(sample.phase, []).append(error)
    return errors


def bounded_least_squares(
    matrix: Floats, target: Floats, lower: Floats, rounds: int = 400
) -> Floats:
    """argmin |matrix·x − target| over x ≥ lower, by coordinate descent on the normal equations."""
    gram, right = matrix.T @ matrix, matrix.T @ target
    x = np.maximum(lower, 1.0)
    diagonal = np.maximum(gram.diagonal(), 1e-12)
    for _ in range(rounds):
        largest = 0.0
        for i in range(len(x)):
            new = max(float(lower[i]), float(x[i] + (right[i] - gram[i] @ x) / diagonal[i]))
            largest = max(largest, abs(new - x[i]))
            x[i] = new
        if largest < 1e-7:
            break
    return x


def _names(samples: Sequence[Sample]) -> list[str]:
    found = {name for sample in samples for name in sample.terms}
    return sorted({*found, *map(pooled_name, found), STEP})


def _ties(names: Sequence[str], index: Mapping[str, int]) -> tuple[Floats, Floats]:
    """Rows that draw buckets to their neighbours, formats to the pool, and all to slowness 1."""
    rows, targets = [], []

    def row(weights: Mapping[int, float], target: float) -> None:
        line = np.zeros(len(names))
        for i, weight in weights.items():
            line[i] = weight
        rows.append(line)
        targets.append(target)

    chains: dict[str, list[tuple[int, int]]] = {}
    for name, i in index.items():
        head, at, knot = name.partition("@")
        if at:
            chains.setdefault(head, []).append((int(knot), i))
            pooled = index[pooled_name(name)]
            if pooled != i:
                row({i: _POOL, pooled: -_POOL}, 0.0)
            row({i: _PRIOR}, _PRIOR)
        elif name == "other":
            row({i: _PRIOR}, _PRIOR)
        else:
            row({i: 1e-4}, 0.0)
    for chain in chains.values():
        ordered = [i for _, i in sorted(chain)]
        for first, second in pairwise(ordered):
            row({first: _SMOOTH, second: -_SMOOTH}, 0.0)
    return np.array(rows), np.array(targets)
