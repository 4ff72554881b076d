"""How far off past predictions were: kept beside the calibration, shown beside new predictions."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ridgeline.roofline.live import RooflineReport
from ridgeline.roofline.storage import cache_folder, write_json

_KEPT_RUNS = 200
_ENOUGH_STEPS = 20


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run's errors: the median of |predicted − measured| ÷ measured by phase, and the share of
    steps that the 80 % intervals held."""

    date: str
    model: str
    executor: str
    steps: int
    prefill_error: float | None
    decode_error: float | None
    covered: float | None


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


def record(report: RooflineReport, *, model: str, executor: str, path: Path | None = None) -> None:
    """Add a run of at least 20 predicted steps; the oldest of 200 goes.

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
    )
    path = path or history_path()
    write_json(path, msgspec.to_builtins(_File(runs=[*read(path), run][-_KEPT_RUNS:])))


def typical_error(runs: Sequence[Run], executor: str) -> float | None:
    """The median over past runs of an executor of their decode error."""
    errors = sorted(
        run.decode_error
        for run in runs
        if run.executor == executor and run.decode_error is not None
    )
    return errors[len(errors) // 2] if errors else None
