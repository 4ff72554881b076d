"""How far off past predictions were: kept beside the calibration, shown beside new predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import msgspec

from ridgeline.roofline.live import RooflineReport
from ridgeline.roofline.storage import cache_folder, write_json

_KEPT_RUNS = 200
_ENOUGH_STEPS = 20


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run's errors: median and p90 of |predicted − measured| ÷ measured by phase, measured ÷
    predicted by the calibration alone (``bias``), and the share of steps that the 80 % intervals
    held. ``format`` is that of the weights; runs of earlier versions say none."""

    date: str
    model: str
    executor: str
    steps: int
    prefill_error: float | None
    decode_error: float | None
    covered: float | None
    format: str = ""
    prefill_p90: float | None = None
    decode_p90: float | None = None
    prefill_bias: float | None = None
    decode_bias: float | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    runs: list[Run]


def history_path(folder: Path | None = None) -> Path:
    """Where the errors of past runs are kept."""
    return (folder or cache_folder()) / "prediction-errors.json"


def read(path: Path | None = None) -> list[Run]:
    """Past runs, oldest first; a file that cannot be read counts as none."""
    try:
        return msgspec.json.decode((path or history_path()).read_bytes(), type=_File).runs
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return []


def record(
    report: RooflineReport,
    *,
    model: str,
    executor: str,
    weights: str = "",
    path: Path | None = None,
) -> None:
    """Add a run of at least 20 predicted steps of a model whose ``weights`` are in that format; the
    oldest of 200 goes.

    Raises:
        DiskError: the file cannot be written.
    """
    if report.num_steps < _ENOUGH_STEPS or report.covered is None:
        return
    run = Run(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model,
        executor=executor,
        steps=report.num_steps,
        prefill_error=report.prefill.median_error,
        decode_error=report.decode.median_error,
        covered=report.covered,
        format=weights,
        prefill_p90=report.prefill.p90_error,
        decode_p90=report.decode.p90_error,
        prefill_bias=report.prefill.bias,
        decode_bias=report.decode.bias,
    )
    path = path or history_path()
    write_json(path, msgspec.to_builtins(_File(runs=[*read(path), run][-_KEPT_RUNS:])))


@dataclass(frozen=True, slots=True, kw_only=True)
class PastErrors:
    """Of past runs of one phase and format: medians of their medians, p90s and biases (measured ÷
    predicted); of the last two ``None`` where runs do not say."""

    num_runs: int
    median: float
    p90: float | None
    bias: float | None

    def __str__(self) -> str:
        p90 = "" if self.p90 is None else f", p90 {self.p90:.0%}"
        bias = "" if self.bias is None else f", steps took × {self.bias:.2f} of the prediction"
        return f"median {self.median:.0%}{p90}{bias} ({self.num_runs} runs)"


def past_errors(
    runs: Sequence[Run], executor: str, *, phase: str, weights: str
) -> PastErrors | None:
    """How far off predictions of a phase (prefill or decode) of models in a format were here."""
    runs = [run for run in runs if run.executor == executor and run.format == weights]

    def known(name: str) -> list[float]:
        values = (getattr(run, f"{phase}_{name}") for run in runs)
        return [value for value in values if value is not None]

    errors, p90s, biases = known("error"), known("p90"), known("bias")
    if not errors:
        return None
    return PastErrors(
        num_runs=len(errors),
        median=median(errors),
        p90=median(p90s) if p90s else None,
        bias=median(biases) if biases else None,
    )
