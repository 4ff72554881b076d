"""A model folder that is written shard by shard, and can be gone on with after any end.

A shard has its name only once all of it is on the disk, and is part of the model once the manifest
has its digest. What layers behind it start from is kept beside it until then. ``config.json`` comes
last: without it the folder is no model.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.arrays import Array
from ridgeline.core.errors import CorruptFileError, DiskError, SettingsError
from ridgeline.weights.files import CONFIG_NAME, INDEX_NAME, is_wanted
from ridgeline.weights.safetensors_writer import write_safetensors
from ridgeline.weights.temporary import copy_durably, write_durably, write_json

MANIFEST_NAME = "ridgeline-manifest.json"
_STATE_FOLDER = ".ridgeline-state"
_LEGAL = ("license", "notice", "use_policy")


class OutputFolder:
    """``identity`` is what decides the bytes: settings, and digests of model and text.

    ``config_name`` is the file that comes last.

    Raises:
        SettingsError: there is something at ``path`` already, and ``resume`` is false; or it is
            not from a run with this identity.
        DiskError: it cannot be made, read or written.
        CorruptFileError: a shard is not what the manifest says.
    """

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        *,
        resume: bool,
        config_name: str = CONFIG_NAME,
    ) -> None:
        self.path, self._identity, self._config_name = path, dict(identity), config_name
        self._done: list[dict[str, Any]] = []
        self._kept: dict[str, Any] = {}
        if resume and (path / MANIFEST_NAME).exists():
            self._recall()
            return
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise SettingsError(
                f"{path} exists already. Give a folder that does not, or --resume to go on with "
                "what an earlier run left there."
                if not resume
                else f"{path} is not what an earlier run left: it has no {MANIFEST_NAME}."
            )
        try:
            (path / _STATE_FOLDER).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiskError(f"{path} could not be made: {error.strerror or error}.") from None
        self._write_manifest()

    @property
    def num_done(self) -> int:
        """Shards that are whole."""
        return len(self._done)

    @property
    def is_complete(self) -> bool:
        return (self.path / self._config_name).exists()

    @property
    def tensors(self) -> frozenset[str]:
        """The names of all tensors so far."""
        return frozenset(name for shard in self._done for name in shard["bytes"])

    @property
    def weights_bytes(self) -> int:
        """Of all tensors so far."""
        return sum(size for shard in self._done for size in shard["bytes"].values())

    @property
    def notes(self) -> list[Any]:
        """What was told of each shard."""
        return [shard["notes"] for shard in self._done]

    def add_shard(self, name: str, tensors: Mapping[str, Array], notes: Any) -> None:
        """Write a shard; ``notes`` are plain values, kept in the manifest."""
        sha256 = write_safetensors(self.path / name, tensors)
        sizes = {tensor: values.nbytes for tensor, values in tensors.items()}
        self._done.append({"name": name, "sha256": sha256, "bytes": sizes, "notes": notes})
        self._write_manifest()

    @property
    def work_path(self) -> Path:
        """A folder for what is needed until the model is finished."""
        return self.path / _STATE_FOLDER

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """A plain value that is made once, and is the same when the work goes on."""
        if name not in self._kept:
            self._kept[name] = make()
            self._write_manifest()
        return self._kept[name]

    def state_path(self, run: int) -> Path:
        """Where the residual streams behind a run of ops are kept."""
        return self.work_path / f"streams-{run}"

    def wanted_path(self, run: int) -> Path:
        """Where those are kept that the unchanged model has there."""
        return self.work_path / f"wanted-{run}"

    def drop_state(self, run: int) -> None:
        with suppress(OSError):
            self.state_path(run).unlink(missing_ok=True)
            self.wanted_path(run).unlink(missing_ok=True)

    def finish(self, source: Path, config: Mapping[str, Any]) -> None:
        """Write the index, copy what belongs to a model beside its weights, and the config."""
        weight_map = {tensor: shard["name"] for shard in self._done for tensor in shard["bytes"]}
        index = {"metadata": {"total_size": self.weights_bytes}, "weight_map": weight_map}
        write_json(self.path / INDEX_NAME, index)
        for file in sorted(source.iterdir()):
            is_legal = file.name.lower().startswith(_LEGAL)
            is_own = file.name in (CONFIG_NAME, INDEX_NAME, MANIFEST_NAME)
            if file.is_file() and not is_own and (is_legal or is_wanted(file.name, False)):
                copy_durably(file, self.path / file.name)
        self.commit(config)

    def commit(self, config: Mapping[str, Any]) -> None:
        """Write the config, after which the folder is whole."""
        shutil.rmtree(self.work_path, ignore_errors=True)
        write_json(self.path / self._config_name, config)

    def _write_manifest(self) -> None:
        kept = {"kept": self._kept} if self._kept else {}
        manifest = {**self._identity, **kept, "shards": self._done}
        write_json(self.path / MANIFEST_NAME, manifest)

    def _recall(self) -> None:
        file = self.path / MANIFEST_NAME
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            shards = found.pop("shards")
            self._kept = found.pop("kept", {})
        except OSError as error:
            raise DiskError(f"{file} could not be read: {error.strerror or error}.") from None
        except (ValueError, KeyError, AttributeError):
            raise CorruptFileError(f"{file} is no manifest of a quantized model.") from None
        check_identity(self.path, found, self._identity)
        for shard in shards:
            path = self.path / shard["name"]
            if not path.exists() or _sha256(path) != shard["sha256"]:
                raise CorruptFileError(
                    f"{path} is not what {MANIFEST_NAME} says; begin again in a new folder."
                )
        self._done = shards
        if not self.is_complete:
            with suppress(OSError):
                (self.path / _STATE_FOLDER).mkdir(exist_ok=True)


def check_identity(path: Path, found: object, identity: Mapping[str, Any]) -> None:
    """
    Raises:
        SettingsError: what is at ``path`` was begun by something else than this run.
    """
    wanted = json.loads(json.dumps(identity))
    if found != wanted:
        found = found if isinstance(found, dict) else {}
        differing = sorted(
            name for name in {*found, *wanted} if found.get(name) != wanted.get(name)
        )
        raise SettingsError(
            f"{path} was begun with other settings or another model: {', '.join(differing)} "
            "differ. Go on with those, or begin in a new folder."
        )


class Streams:
    """The residual streams of all windows behind a run of ops, float32, in a file."""

    def __init__(self, path: Path, lengths: list[int], width: int) -> None:
        self._path, self._lengths, self._width = path, lengths, width

    @property
    def exists(self) -> bool:
        return self._path.exists()

    def read(self, window: int) -> torch.Tensor:
        """``[T, D]`` of one window."""
        length, row_bytes = self._lengths[window], self._width * torch.float32.itemsize
        out = torch.empty(length, self._width)
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(sum(self._lengths[:window]) * row_bytes)
                found = file.readinto(out.view(torch.uint8).numpy().data)
        except OSError as error:
            raise DiskError(f"{self._path} could not be read: {error.strerror}.") from None
        if found != length * row_bytes:
            raise CorruptFileError(f"{self._path} is cut short; begin again in a new folder.")
        return out

    def write(self, streams: Iterator[torch.Tensor]) -> None:
        """All windows in order; the file is there as a whole or not at all."""
        write_durably(self._path, (x_TD.contiguous().numpy().data.cast("B") for x_TD in streams))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
