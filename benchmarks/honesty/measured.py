"""What a run measured, as it is kept: everything that a report is made of."""

from pathlib import Path
from typing import Any

import msgspec

from ridgeline.bench.step_timing import StepTimes
from ridgeline.core.errors import CorruptFileError
from ridgeline.planning.workload import Arrival
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.storage import write_json

SCHEMA = 3


class ModelTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one model."""

    shape: str
    format: str
    times: tuple[StepTimes, ...]


class TrafficTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A trace that the real engine answered several times: seconds to each request's first token.

    The fastest visit counts, as it does for steps, since neighbours only ever add. ``again`` are
    steps of the calibration that were measured between the visits.
    """

    load: float
    shape: str
    format: str
    arrivals: tuple[Arrival, ...]
    visits_s: tuple[tuple[float, ...], ...]
    again: ModelTimes | None = None

    @property
    def mean_ttft_s(self) -> float:
        return min(sum(visit) / len(visit) for visit in self.visits_s)


class Measurements(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``lies`` are steps measured under conditions that falsify them, by what was done.

    ``repeated`` are steps of the calibration, measured again in turns with the tests.
    ``memory_rates`` are main memory's bytes per second before each round of measurements.
    """

    schema: int
    created: str
    executor: str
    ceilings: Ceilings
    host_step_s: float
    host_segment_s: float
    calibration: tuple[ModelTimes, ...]
    tests: tuple[ModelTimes, ...] = ()
    repeated: tuple[ModelTimes, ...] = ()
    lies: dict[str, tuple[StepTimes, ...]] = {}
    traffic: tuple[TrafficTimes, ...] = ()
    memory_rates: tuple[float, ...] = ()
    seconds: float = 0.0
    conditions: dict[str, Any] = {}


def save(measurements: Measurements, path: Path) -> None:
    """Write the file. Raises `DiskError`."""
    write_json(path, msgspec.to_builtins(measurements))


def load(path: Path) -> Measurements:
    """What a run wrote.

    Raises:
        CorruptFileError: the file cannot be read, or is something else.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Measurements)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{path} holds no measurements: {error}") from error
    if found.schema != SCHEMA:
        raise CorruptFileError(f"{path} is of version {found.schema}, and this is {SCHEMA}.")
    return found
