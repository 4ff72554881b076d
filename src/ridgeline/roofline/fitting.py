"""Fitting the coefficients of `features` to measured steps, and how far off the fit is.

A coefficient is positive and may be off by a factor, so logarithms are fitted, of coefficients and
of seconds: each coefficient has a prior, a plausible value and how many times it may be more or
less, and what was measured moves it from there. Formats of one family are tied to each other. Steps
that agree with no coefficients (a neighbour took a core) count less.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

from ridgeline.roofline.features import Overlap, Terms

OVERLAP = "overlap"
_STEP_NOISE = 0.04  # of a measured step, relative
_OUTLIER = 0.1  # relative error from which a step counts half as much or less
_ROUNDS = 40

# Plausible values, and the factor within which they lie two times of three.
_PRIORS: Mapping[str, tuple[float, float]] = {
    "step": (1e-4, 4.0),
    "op": (3e-6, 3.0),
    "segment": (2e-6, 4.0),
    "sequence": (1e-5, 4.0),
    "row": (1e-5, 4.0),
    "other": (0.5, 3.0),
    "link": (1.0, 1.01),
    "stream": (1.2, 1.5),
    "near": (1.3, 1.5),
    "unpack/float": (1.0, 3.0),
    "unpack/codes": (1.0, 3.0),
    "unpack/tiles": (1.0, 3.0),
    "product/float": (1.2, 3.0),
    "product/codes": (1.0, 3.0),
    "product/tiles": (1.5, 3.0),
    "fill/float": (30.0, 2.0),
    "fill/codes": (70.0, 2.0),
    "fill/tiles": (50.0, 2.0),
    "attention/read": (1.3, 1.5),
    "attention/load": (1.5, 2.0),
    "attention/product": (2.0, 2.0),
    "overlap/float": (2.0, 2.0),
    "overlap/codes": (4.0, 1.5),
    "overlap/tiles": (1.0, 2.0),
    "overlap/attention": (1.0, 2.0),
}
_TIE = 1.25  # the factor within which the formats of a family agree

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


def predict(coefficients: Mapping[str, float], terms: Terms) -> float:
    """Seconds. What was never measured takes the coefficient of its family, or of all families."""
    total = weighted(coefficients, terms.alone)
    return total + sum(overlap_seconds(coefficients, each) for each in terms.overlaps)


def overlap_seconds(coefficients: Mapping[str, float], overlap: Overlap) -> float:
    """Seconds of two things at once: ‖(memory, arithmetic)‖ₚ, p = 1 + the kind's *overlap*.

    The longer of the two where the overlap is perfect (∞), their sum where there is none (0).
    """
    sides = weighted(coefficients, overlap.memory), weighted(coefficients, overlap.arithmetic)
    longer = max(sides)
    if not longer:
        return 0.0
    power = 1.0 + coefficient(coefficients, f"{OVERLAP}/{overlap.kind}")
    whole: float = longer * (1.0 + (min(sides) / longer) ** power) ** (1.0 / power)
    return whole


def coefficient(coefficients: Mapping[str, float], name: str) -> float:
    """``product/codes/int4``, else ``product/codes``, else ``product``, else 1."""
    while name:
        found = coefficients.get(name)
        if found is not None:
            return found
        name = name.rpartition("/")[0]
    return 1.0


def weighted(coefficients: Mapping[str, float], amounts: Mapping[str, float]) -> float:
    """The seconds of some amounts, if they take them one after another."""
    return sum(coefficient(coefficients, name) * value for name, value in amounts.items())


def fit(samples: Sequence[Sample]) -> dict[str, float]:
    """Coefficients by name, those of families included: the most probable ones, by Gauss-Newton
    steps on the logarithms (damped as Levenberg and Marquardt do)."""
    names = _names(samples)
    design = _Design(samples, names)
    priors, targets, start = _prior_rows(names)
    seconds = np.log([sample.seconds for sample in samples])
    logs, damping = start, 1e-3
    loss, step = _loss(design, seconds, priors, targets, logs)
    for _ in range(_ROUNDS):
        gram, right = step
        move = np.linalg.solve(gram + damping * np.diag(gram.diagonal()), right)
        tried, tried_step = _loss(design, seconds, priors, targets, logs + np.clip(move, -1, 1))
        if tried <= loss:
            done = loss - tried < 1e-9 * loss
            logs, loss, step = logs + np.clip(move, -1, 1), tried, tried_step
            damping = max(damping / 5, 1e-9)
            if done:
                break
        else:
            damping *= 10
    return {name: float(value) for name, value in zip(names, np.exp(logs), strict=True)}


class _Design:
    """The amounts of all samples as matrices [samples, names]."""

    def __init__(self, samples: Sequence[Sample], names: Sequence[str]) -> None:
        index = {name: i for i, name in enumerate(names)}
        shape = (len(samples), len(names))
        self.alone = np.zeros(shape)
        # (index of the overlap's coefficient, memory, arithmetic), of the n-th overlap of a kind.
        self.overlaps: dict[tuple[str, int], tuple[int, Floats, Floats]] = {}
        for row, sample in enumerate(samples):
            _fill(self.alone[row], sample.terms.alone, index)
            seen: Counter[str] = Counter()
            for each in sample.terms.overlaps:
                key = (each.kind, seen[each.kind])
                seen[each.kind] += 1
                if key not in self.overlaps:
                    power = index[f"{OVERLAP}/{each.kind}"]
                    self.overlaps[key] = (power, np.zeros(shape), np.zeros(shape))
                _, memory, arithmetic = self.overlaps[key]
                _fill(memory[row], each.memory, index)
                _fill(arithmetic[row], each.arithmetic, index)

    def logs(self, coefficients: Floats) -> tuple[Floats, Floats]:
        """log seconds of each sample, and their derivatives by the logarithms of coefficients."""
        seconds, slopes = self.alone @ coefficients, self.alone * coefficients
        for at, memory, arithmetic in self.overlaps.values():
            power = 1.0 + coefficients[at]
            first, second = memory @ coefficients, arithmetic @ coefficients
            longer = np.maximum(np.maximum(first, second), 1e-30)
            ratio = np.maximum(np.minimum(first, second) / longer, 1e-30)
            powered = 1.0 + ratio**power
            whole = longer * powered ** (1 / power) * (longer > 1e-30)
            safe = np.maximum(whole, 1e-30)
            for side, amounts in ((first, memory), (second, arithmetic)):
                slopes += amounts * coefficients * ((side / safe) ** (power - 1))[:, None]
            by_power = (powered - 1) * np.log(ratio) / powered - np.log(powered) / power
            slopes[:, at] += whole * by_power / power * coefficients[at]
            seconds = seconds + whole
        return np.log(seconds), slopes / seconds[:, None]


def _fill(row: Floats, amounts: Mapping[str, float], index: Mapping[str, int]) -> None:
    for name, value in amounts.items():
        row[index[name]] += value


def _loss(
    design: _Design, seconds: Floats, priors: Floats, targets: Floats, logs: Floats
) -> tuple[float, tuple[Floats, Floats]]:
    """Half the loss's doubles: its value, and the normal equations of the next step.

    A step's error e counts log(1 + (e / outlier)²), as with a Cauchy distribution.
    """
    predicted, slopes = design.logs(np.exp(logs))
    errors = seconds - predicted
    scale = (_OUTLIER / _STEP_NOISE) ** 2
    weights = 1 / (_STEP_NOISE**2 * (1 + (errors / _OUTLIER) ** 2))
    off = targets - priors @ logs
    value = float(scale * np.log1p((errors / _OUTLIER) ** 2).sum() + off @ off)
    gram = slopes.T @ (slopes * weights[:, None]) + priors.T @ priors
    return value, (gram, slopes.T @ (weights * errors) + priors.T @ off)


def _names(samples: Sequence[Sample]) -> list[str]:
    found: set[str] = set()
    for sample in samples:
        found.update(sample.terms.alone)
        for overlap in sample.terms.overlaps:
            found.update(overlap.memory, overlap.arithmetic, (f"{OVERLAP}/{overlap.kind}",))
    for name in tuple(found):
        while name not in _PRIORS and name:
            name = name.rpartition("/")[0]
            found.add(name)
    return sorted(found - {""})


def _prior_rows(names: Sequence[str]) -> tuple[Floats, Floats, Floats]:
    """Rows and their targets, in units of their tolerance, and the logarithms to start from."""
    index = {name: i for i, name in enumerate(names)}
    rows, targets = np.zeros((len(names), len(names))), np.zeros(len(names))
    start = np.zeros(len(names))
    for name, i in sorted(index.items(), key=lambda item: item[0].count("/")):
        if name in _PRIORS:
            value, factor = _PRIORS[name]
            rows[i, i] = 1 / log(factor)
            targets[i] = log(value) / log(factor)
            start[i] = log(value)
        else:
            parent = index[name.rpartition("/")[0]]
            rows[i, i], rows[i, parent] = 1 / log(_TIE), -1 / log(_TIE)
            start[i] = start[parent]
    return rows, targets, start


def held_out_errors(
    samples: Sequence[Sample], needed: Collection[str] = ()
) -> dict[str, list[float]]:
    """log(measured ÷ predicted) by phase, each sample predicted by a fit without its shape; and by
    `of_new_format` of its phase, by a fit without its format where another of its family is left.

    Shapes that are ``needed``, as the only ones to tell something, are never left out.
    """
    errors: dict[str, list[float]] = {}

    def note(kept: Sequence[Sample], left_out: Sequence[Sample], key: Callable[[str], str]) -> None:
        coefficients = fit(kept)
        for sample in left_out:
            error = log(sample.seconds / predict(coefficients, sample.terms))
            errors.setdefault(key(sample.phase), []).append(error)

    keys: Mapping[str, Callable[[str], str]] = {"shape": str, "format": of_new_format}
    for attribute, key in keys.items():
        values = {getattr(sample, attribute) for sample in samples}
        for value in sorted(values) if len(values) > 1 else ():
            left_out = [s for s in samples if getattr(s, attribute) == value]
            kept = [s for s in samples if getattr(s, attribute) != value]
            if value not in needed and _families(left_out) <= _families(kept):
                note(kept, [s for s in left_out if s.shape not in needed], key)
    for phase in {sample.phase for sample in samples}:
        if phase not in errors:  # of one shape alone
            others = errors.get(of_new_format(phase))
            if others is None:
                note(samples, [s for s in samples if s.phase == phase], str)
            else:
                errors[phase] = others
    return errors


def of_new_format(phase: str) -> str:
    """The name of a phase's steps of models in a format that was never measured."""
    return f"{phase} of a new format"


def _families(samples: Sequence[Sample]) -> set[str]:
    """Kinds of kernels that the samples ran."""
    return {overlap.kind for sample in samples for overlap in sample.terms.overlaps}
