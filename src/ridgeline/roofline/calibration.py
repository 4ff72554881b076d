"""Efficiencies of one executor on one machine: a dated, schema-checked JSON file.

Without one, machines of the catalogue are predicted with the efficiencies below, a wide interval,
and the words "not measured".
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import log
from pathlib import Path

import msgspec
import numpy as np

from ridgeline.core.errors import CorruptFileError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.host import cpu_name, usable_cores
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.fitting import Sample, fit, held_out_errors, of_new_format
from ridgeline.roofline.storage import cache_folder, write_json

SCHEMA = 4  # one more whenever `features` names or counts something else
COVERAGE = 0.8
CONTRADICTION = 1.5  # measured ÷ predicted, or its inverse, beyond any error of a sound calibration


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The interval that holds 80 % of measured ÷ predicted, and how large errors typically are.

    ``median_error`` and ``p90_error`` are of |measured − predicted| ÷ measured on steps that the
    fit had not seen; ``count`` is their number.
    """

    low: float
    high: float
    median_error: float
    p90_error: float
    count: int

    @property
    def deviation(self) -> float:
        """The standard deviation of the logarithm of measured ÷ predicted."""
        return log(self.high / self.low) / (2 * _NORMAL_90)


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `predict` needs to know of a machine and an executor.

    ``coefficients`` are named as in `features`; ``spreads`` are by phase, and of formats that were
    not measured by `of_new_format` of the phase (see `spread`). ``host_step_s`` and
    ``host_segment_s`` are what the scheduler and the engine add to a step, and to each sequence.
    ``level`` scales all predicted seconds: it is what steps measured later asked for (`corrected`).
    """

    schema: int
    created: str
    executor: str
    ceilings: Ceilings
    coefficients: dict[str, float]
    spreads: dict[str, Spread]
    host_step_s: float = 0.0
    host_segment_s: float = 0.0
    dense_attention: bool = False
    formats: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    level: float = 1.0

    @property
    def measured(self) -> bool:
        return self.ceilings.measured

    def spread(self, phase: str, form: NumberFormat) -> Spread:
        """That of a phase's steps, of models whose weights are in a format."""
        is_new = form.name not in self.formats
        new = self.spreads.get(of_new_format(phase)) if is_new else None
        return new or self.spreads[phase]


# Typical of tuned GPU engines: 85 % of bandwidth in decode, 60 % of peak in large products (45 %
# in attention), 2.3 µs for each op within a CUDA graph. They reproduce published H100 figures: TPOT
# 6.44 ms + 4.37e-5 ms per token of context for 8B in 16 bits.
_NORMAL_90 = 1.2816  # deviations from the mean to the 90th percentile
_TYPICAL = {
    "step": 2e-4,
    "op": 2.3e-6,
    "segment": 0.0,
    "sequence": 0.0,
    "row": 1e-6,
    "link": 1.0,
    "other": 1.0,
    "stream": 1 / 0.85,
    "unpack": 0.0,
    "fill": 0.0,
    "product": 1 / 0.6,
    "attention/read": 1 / 0.85,
    "attention/product": 1 / 0.45,
    "overlap": 5.0,
}
_TYPICAL_SPREAD = Spread(low=0.7, high=1.5, median_error=0.2, p90_error=0.5, count=0)


def typical(ceilings: Ceilings) -> Calibration:
    """A machine of the catalogue: its datasheet and typical efficiencies."""
    return Calibration(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        executor="typical",
        ceilings=ceilings,
        coefficients=dict(_TYPICAL),
        spreads={"prefill": _TYPICAL_SPREAD, "decode": _TYPICAL_SPREAD},
        host_step_s=3e-4,
        host_segment_s=2e-6,
    )


def calibrate(
    samples: Sequence[Sample],
    ceilings: Ceilings,
    *,
    executor: str,
    dense_attention: bool,
    host_step_s: float = 0.0,
    host_segment_s: float = 0.0,
    needed: Collection[str] = (),
) -> Calibration:
    """Fit measured steps, and estimate the error on shapes and formats that were not measured.

    Shapes that are ``needed`` are in every fit.
    """
    errors = held_out_errors(samples, needed)
    return Calibration(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        executor=executor,
        ceilings=ceilings,
        coefficients=fit(samples),
        spreads={phase: spread(logs) for phase, logs in errors.items()},
        host_step_s=host_step_s,
        host_segment_s=host_segment_s,
        dense_attention=dense_attention,
        formats=tuple(sorted({sample.format for sample in samples})),
        shapes=tuple(sorted({sample.shape for sample in samples})),
    )


def spread(logs: Sequence[float]) -> Spread:
    """From log(measured ÷ predicted) of steps that were predicted without having been seen."""
    # One place further out on each side than the plain quantile, since the sample is small.
    count = len(logs)
    tail = max(0.0, (1 - COVERAGE) / 2 - 0.5 / count)
    low, high = np.quantile(logs, [tail, 1 - tail])
    relative = np.abs(1 - np.exp(-np.asarray(logs)))
    return Spread(
        low=float(np.exp(low)),
        high=float(np.exp(high)),
        median_error=float(np.median(relative)),
        p90_error=float(np.quantile(relative, 0.9)),
        count=count,
    )


def describe(calibration: Calibration | None) -> str:
    """What the seconds of steps are predicted with, in a line."""
    if calibration is None:
        return "linear in tokens and context (ridgeline roofline --calibrate measures this machine)"
    errors = ", ".join(
        f"{spread.median_error:.0%} in {phase}"
        for phase, spread in sorted(calibration.spreads.items())
    )
    return (
        f"calibrated for the {calibration.executor} executor, {calibration.created[:10]}; median "
        f"error on what it had not seen: {errors}"
        + "".join(f"; {doubt}" for doubt in doubts(calibration))
    )


def disturbance(calibration: Calibration) -> str | None:
    """What other processes did while it was measured, if they worked then, in a clause."""
    conditions = calibration.ceilings.conditions
    if not conditions.get("contended"):
        return None
    return (
        f"other processes took {conditions.get('others_share', 0.0):.0%} of the processors "
        "while it was measured, so that predictions may be too slow (ridgeline roofline "
        "--calibrate measures anew)"
    )


def doubts(calibration: Calibration) -> Iterator[str]:
    """Why predictions with a calibration may be off, each in a clause."""
    conditions = calibration.ceilings.conditions
    if (disturbed := disturbance(calibration)) is not None:
        yield disturbed
    if conditions.get("quick"):
        yield "measured in 90 s (ridgeline roofline --calibrate takes minutes and knows more)"
    if calibration.level != 1.0:
        yield f"corrected to {calibration.level:.2g} times its seconds by steps measured since"


def contradiction(ratios: Sequence[float]) -> float | None:
    """The median of measured ÷ predicted seconds, if every one is far off to the same side."""
    if not ratios or not (min(ratios) > CONTRADICTION or max(ratios) < 1 / CONTRADICTION):
        return None
    return float(np.median(ratios))


def corrected(calibration: Calibration, ratio: float) -> Calibration:
    """With all predicted seconds times ``ratio``."""
    return msgspec.structs.replace(calibration, level=calibration.level * ratio)


def measured_elsewhere(found: Calibration, kernels: str | None) -> str | None:
    """A sentence if a calibration is of another processor, of another number of its cores, or of
    other ``kernels``: processors of one name may differ in what their host lets them do."""
    conditions = found.ceilings.conditions
    there = conditions.get("cpu"), conditions.get("cores"), conditions.get("kernels")
    here = cpu_name(), usable_cores(), kernels
    if all(each in (None, own) for each, own in zip(there, here, strict=True)):
        return None
    return (
        f"The calibration of the {found.executor} executor is of {_machine(there)}, and this is "
        f"{_machine(here)}; `ridgeline roofline --calibrate -t {usable_cores()}` measures it."
    )


def _machine(facts: tuple[object, object, object]) -> str:
    cpu, cores, kernels = facts
    return f"{cpu} with {cores} cores" + (f" and {kernels} kernels" if kernels else "")


def calibration_path(executor: str, folder: Path | None = None) -> Path:
    """Where the calibration of an executor on this machine is kept."""
    return (folder or cache_folder()) / f"calibration-{executor}.json"


def save(calibration: Calibration, path: Path) -> None:
    """Write the file. Raises `DiskError`."""
    write_json(path, msgspec.to_builtins(calibration))


def load(path: Path) -> Calibration | None:
    """The calibration in a file; ``None`` if there is none, or it is of another version.

    Raises:
        CorruptFileError: the file is not a calibration.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return None
    try:
        if _version(data) != SCHEMA:
            return None
        found = msgspec.json.decode(data, type=Calibration)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{path} is not a calibration ({error}); delete it.") from error
    _check(found, path)
    return found


def _version(data: bytes) -> int | None:
    value = msgspec.json.decode(data)
    if not isinstance(value, Mapping):
        raise msgspec.DecodeError("not an object")
    version = value.get("schema")
    return version if isinstance(version, int) else None


def _check(found: Calibration, path: Path) -> None:
    rates = [level.bytes_per_s for level in found.ceilings.levels]
    rates += found.ceilings.flops_per_s.values()
    spreads = found.spreads.values()
    sound = (
        rates
        and len(rates) > len(found.ceilings.levels) > 0
        and all(rate > 0 for rate in rates)
        and all(value >= 0 for value in found.coefficients.values())
        and 0 < found.level < float("inf")
        and all(0 < each.low <= each.high for each in spreads)
        and {"prefill", "decode"} <= found.spreads.keys()
    )
    if not sound:
        raise CorruptFileError(f"{path} holds a calibration that cannot be; delete it.")
