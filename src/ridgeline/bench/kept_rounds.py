"""Rounds of a measurement in a file, so that one that was interrupted goes on where it was."""

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ridgeline.core.errors import DiskError
from ridgeline.core.host import cpu_name
from ridgeline.roofline.storage import write_json

_MAX_AGE_S = 86_400.0

Visits = list[list[list[tuple[float, ...]]]]  # of a model's steps, by round


class KeptRounds:
    """``visits`` of each model's steps and what others took (``shares``), after each round.

    Those in the file count if they are of the same machine and of what ``wanted`` says, and less
    than a day old. Without a ``path`` nothing is kept.
    """

    def __init__(self, path: Path | None, wanted: Mapping[str, Any]) -> None:
        self._path = path
        text = json.dumps({**wanted, "cpu": cpu_name()}, sort_keys=True, default=str)
        self._key = hashlib.sha256(text.encode()).hexdigest()
        self.visits: Visits | None = None
        self.shares: list[float] = []
        if path is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                self._read(json.loads(path.read_text()))

    def _read(self, found: Mapping[str, Any]) -> None:
        if found["key"] != self._key or not 0 <= time.time() - found["time_s"] < _MAX_AGE_S:
            return
        visits = [
            [[tuple(map(float, visit)) for visit in step] for step in model]
            for model in found["visits"]
        ]
        shares = [float(share) for share in found["shares"]]
        if all(len(step) == len(shares) for model in visits for step in model):
            self.visits, self.shares = visits, shares

    def save(self, visits: Visits, shares: list[float]) -> None:
        """Keep the rounds so far, if the disk takes them."""
        if self._path is None:
            return
        kept = {"key": self._key, "time_s": time.time(), "visits": visits, "shares": shares}
        with suppress(DiskError):
            write_json(self._path, kept)

    def forget(self) -> None:
        """The measurement is whole."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
