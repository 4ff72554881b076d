"""Configurations of products that were timed, on disk: one file for each device and its kernels."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ridgeline.core.errors import DiskError
from ridgeline.kernels.triton import NUM_AXES, LinearConfig, LinearKey, kernels_digest
from ridgeline.roofline.storage import write_json

_log = logging.getLogger(__name__)

_MOST = {"block_o": 1024, "block_k": 4096, "splits": 64, "num_warps": 32, "num_stages": 16}
_POWERS = ("block_o", "block_k", "splits", "num_warps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The best configuration so far, the seconds of a product with it and with the guess, and how
    many axes of the search are done."""

    config: LinearConfig
    seconds: float
    guess_seconds: float
    axes: int

    @property
    def is_complete(self) -> bool:
        return self.axes >= NUM_AXES

    @property
    def rank(self) -> tuple[int, float]:
        """Orders entries of one key by how good they are."""
        return self.axes, -self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningCache:
    """A folder of such files. The name and the header of a file cover the device, Triton's version
    and the sources of the kernels: what was timed with others is not read.

    A file appears by renaming. What other processes have written meanwhile is kept: of two entries
    the one whose search has come further, or else the faster.
    """

    folder: Path

    def read(self, device: str) -> dict[LinearKey, Tuned]:
        """What is known; a file that is damaged or another's is told and taken for none."""
        path = self._path(_header(device))
        try:
            return self._entries(device)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("The tuned products of %s are timed again: %s.", path, error)
            return {}

    def write(self, device: str, tuned: Mapping[LinearKey, Tuned]) -> None:
        """Add to the file, or replace one that is damaged; what cannot be written is told."""
        header = _header(device)
        try:
            others = self._entries(device)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            others = {}
        kept = dict(tuned)
        for key, other in others.items():
            kept[key] = max(kept.get(key, other), other, key=lambda each: each.rank)
        try:
            write_json(
                self._path(header),
                {
                    "header": header,
                    "tuned": [{"key": key._asdict(), **asdict(kept[key])} for key in sorted(kept)],
                },
            )
        except DiskError as error:
            _log.warning("%s The next start times products again.", error)

    def _entries(self, device: str) -> dict[LinearKey, Tuned]:
        """What the file has; nothing where there is none. Raises what is wrong with it."""
        header = _header(device)
        try:
            data = json.loads(self._path(header).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        if not isinstance(data, dict) or data.get("header") != header:
            raise ValueError("its header is another's")
        return dict(map(_entry, data["tuned"]))

    def _path(self, header: Mapping[str, str]) -> Path:
        digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
        return self.folder / f"linear-{digest[:16]}.json"


def _header(device: str) -> dict[str, str]:
    import triton

    return {"device": device, "triton": str(triton.__version__), "kernels": kernels_digest()}


def _entry(entry: Any) -> tuple[LinearKey, Tuned]:
    """An entry of a file.

    Raises:
        ValueError, TypeError or KeyError: it is none.
    """
    key = LinearKey(**entry["key"])
    types = {name: type(value) for name, value in key._asdict().items()}
    if types != LinearKey.__annotations__:
        raise ValueError(f"{entry['key']} is no product")
    values = dict(entry["config"])
    if set(values) != {each.name for each in fields(LinearConfig)}:
        raise ValueError(f"{sorted(values)} are no configuration")
    for name, value in values.items():
        in_range = type(value) is int and 1 <= value <= _MOST[name]
        if not in_range or (name in _POWERS and value & (value - 1)):
            raise ValueError(f"{name} {value!r} is not possible")
    seconds, guess_seconds, axes = entry["seconds"], entry["guess_seconds"], entry["axes"]
    if not (0 < float(seconds) < 1e3 and 0 < float(guess_seconds) < 1e3 and type(axes) is int):
        raise ValueError("its times are not possible")
    return key, Tuned(
        config=LinearConfig(**values),
        seconds=float(seconds),
        guess_seconds=float(guess_seconds),
        axes=axes,
    )
