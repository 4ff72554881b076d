"""How far off past predictions were: kept beside the calibration, shown beside new predictions."""

from collections.abc import Collection, Iterable
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

    phase: str
    weights: str
    num_runs: int
    median: float
    p90: float | None
    bias: float | None

    def __str__(self) -> str:
        p90 = "" if self.p90 is None else f", p90 {self.p90:.0%}"
        bias = "" if self.bias is None else f", steps took × {self.bias:.2f} of the prediction"
        runs = f"{self.num_runs} run" + "s" * (self.num_runs != 1)
        return f"{self.phase} of {self.weights}: median {self.median:.0%}{p90}{bias} ({runs})"


def past_errors(
    executor: str, weights: Collection[str] | None = None, path: Path | None = None
) -> list[PastErrors]:
    """How far off predictions were here, by the format of the weights and by phase; without
    ``weights``, of all formats. Runs of earlier versions, which say none, do not count."""
    runs = [run for run in read(path) if run.executor == executor and run.format]
    formats = sorted({run.format for run in runs if weights is None or run.format in weights})
    found = []
    for form in formats:
        of_format = [run for run in runs if run.format == form]
        for phase in ("prefill", "decode"):
            errors, p90s, biases = (
                [
                    value
                    for run in of_format
                    if (value := getattr(run, f"{phase}_{name}")) is not None
                ]
                for name in ("error", "p90", "bias")
            )
            if errors:
                found.append(
                    PastErrors(
                        phase=phase,
                        weights=form,
                        num_runs=len(errors),
                        median=median(errors),
                        p90=median(p90s) if p90s else None,
                        bias=median(biases) if biases else None,
                    )
                )
    return found


def past_sentences(errors: Iterable[PastErrors]) -> list[str]:
    """To be read beside a prediction."""
    return [f"Past predictions here, {each}." for each in errors]
