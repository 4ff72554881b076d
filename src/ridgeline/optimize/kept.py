"""What a run has measured, in a file, so that one that was interrupted goes on where it was."""

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.core.errors import DiskError
from ridgeline.core.host import cpu_name, usable_cores
from ridgeline.evaluation import Quality
from ridgeline.optimize.measuring import Visit
from ridgeline.optimize.space import Candidate
from ridgeline.roofline.storage import cache_folder, write_json

_MAX_AGE_S = 86_400.0


class KeptVisit(msgspec.Struct, frozen=True, kw_only=True):
    """A visit: of which candidate, in which turn of which stage."""

    stage: str
    turn: int
    candidate: Candidate
    visit: Visit


class Kept(msgspec.Struct, kw_only=True):
    """Everything that took time: ``spent_s`` of the budget, ``rate_rps`` that was found for the
    load and ``level``, measured over predicted seconds; visits, and quality by format."""

    key: str
    time_s: float
    spent_s: float = 0.0
    rate_rps: float | None = None
    level: float | None = None
    visits: list[KeptVisit] = []
    qualities: list[tuple[Candidate, Quality]] = []

    def visits_of(self, stage: str) -> list[KeptVisit]:
        """In the order in which they were made."""
        return [each for each in self.visits if each.stage == stage]


class Journal:
    """``kept``, and where it is written after each visit.

    What is there counts if it is of the same machine and of what ``asked`` says, and less than a
    day old.
    """

    def __init__(self, asked: Mapping[str, Any], folder: Path | None = None) -> None:
        text = json.dumps(
            {**asked, "cpu": cpu_name(), "cores": usable_cores()}, sort_keys=True, default=str
        )
        key = hashlib.sha256(text.encode()).hexdigest()
        self._path = (folder or cache_folder()) / "optimize" / f"{key[:16]}.json"
        self.kept = Kept(key=key, time_s=time.time())
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            found = msgspec.json.decode(self._path.read_bytes(), type=Kept)
            if found.key == key and 0 <= time.time() - found.time_s < _MAX_AGE_S:
                self.kept = found

    def save(self) -> None:
        """Write everything so far, if the disk takes it."""
        with suppress(DiskError):
            write_json(self._path, msgspec.to_builtins(self.kept))

    def forget(self) -> None:
        """The run is whole."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
