"""Packed weights on disk, so that a model is packed once and mapped at every later start."""

import hashlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ridgeline.core.errors import CorruptFileError, DiskError, SettingsError
from ridgeline.core.formats import NumberFormat
from ridgeline.executors.cpu.packed_file import read_packed, write_packed
from ridgeline.executors.cpu.weights import PackedWeights, expected_bytes, pack_weights
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.cpu.library import ABI_VERSION
from ridgeline.kernels.cpu.memory import drop_pages
from ridgeline.kernels.cpu.pool import Pool
from ridgeline.roofline.storage import cache_folder
from ridgeline.weights import CheckpointWeights, DummyWeights

_log = logging.getLogger(__name__)

PACKING_VERSION = 5  # changes whenever the same weights are packed to other bytes
_SUFFIX = ".packed"
_KNOWN_DIGESTS = "weights.json"
_STALE_S = 24 * 3600  # age of a temporary file that nobody is writing any more


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCache:
    """A folder of files, one for each model and choice of formats.

    The key covers all bytes of the checkpoint (see `content_digest`, which reads a file once and
    then knows it by inode, size and times), how they become weights, the formats, how the kernels
    round, and the versions of layouts and packing: whatever changes the packed bytes changes the
    name. A file appears by renaming, so that processes that pack the same model at once replace
    equal files.

    Attributes:
        folder: made when it is first needed.
        max_bytes: of all files together; the ones that were used longest ago go first.
        min_bytes: of a checkpoint; smaller ones are packed faster than they are looked up.
        keep_random: whether random weights are kept as well, for benchmarks that start often.
        keep_all: whether every model is kept, and run from its file: it may be larger than memory.
    """

    folder: Path
    max_bytes: int
    min_bytes: int = 1 << 28
    keep_random: bool = False
    keep_all: bool = False

    def pack(self, pool: Pool, model: ExecutorModel) -> PackedWeights:
        """`pack_weights`, unless the same was packed before.

        Raises:
            SettingsError: all models are to be kept, and this one cannot be.
        """
        digest: Callable[[], str]
        match model.weights:
            case CheckpointWeights() as source if (
                self.keep_all or source.num_bytes() >= self.min_bytes
            ):
                digest = partial(source.digest, memory=self.folder / _KNOWN_DIGESTS)
            case DummyWeights() as source if self.keep_random or self.keep_all:
                digest = source.digest
            case _:
                return pack_weights(pool, model)
        expected = expected_bytes(pool, model)
        if expected > self.max_bytes:  # said before the checkpoint is read for its digest
            if self.keep_all:
                raise SettingsError(
                    f"The packed weights take about {expected:,} bytes, and packed_cache_bytes is "
                    f"{self.max_bytes:,}: weights_memory_bytes needs all of them there."
                )
            self._warn_too_large(f"about {expected / 1e9:.2f}")
            return pack_weights(pool, model)
        key = _key(digest(), model.quantization, pool.level)
        path = self.folder / (key + _SUFFIX)
        found = self._read(path, key)
        if found is None:
            if not self.keep_all:
                found = pack_weights(pool, model)
                self._write(path, key, found)
                return found
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._write(path, key, pack_weights(pool, model, folder=self.folder))
            found = self._read(path, key)
            if found is None:
                raise DiskError(f"The packed weights could not be kept in {self.folder}.")
        return found

    def _read(self, path: Path, key: str) -> PackedWeights | None:
        try:
            weights = read_packed(path, key, ahead=not self.keep_all)
        except FileNotFoundError:
            return None
        except (OSError, CorruptFileError) as error:
            _log.warning("The packed weights are made again: %s", error)
            return None
        with suppress(OSError):  # another user's can be read, and not touched
            os.utime(path)  # it was used
        _log.info("Packed weights: %s", path)
        return weights

    def _warn_too_large(self, size: str) -> None:
        _log.warning(
            "The packed weights take %s GB and packed_cache_bytes is %.2f GB: they are not kept, "
            "and every start packs them again.",
            size,
            self.max_bytes / 1e9,
        )

    def _write(self, path: Path, key: str, weights: PackedWeights) -> None:
        if weights.num_bytes > self.max_bytes:
            self._warn_too_large(f"{weights.num_bytes / 1e9:.2f}")
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.keep_all:  # which lie in a file already
                write_packed(path, key, weights, lambda array: drop_pages((array,)))
            else:
                write_packed(path, key, weights)
            self._delete_oldest()
        except OSError as error:
            _log.warning(
                "The packed weights could not be kept in %s (%s); the next start packs them again.",
                self.folder,
                error.strerror or error,
            )

    def _delete_oldest(self) -> None:
        """Delete what was used longest ago, and what a process that was killed left."""
        for left in self.folder.glob("*.tmp"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _STALE_S:
                    left.unlink()
        files = []
        for file in self.folder.glob(f"*{_SUFFIX}"):
            with suppress(OSError):
                stat = file.stat()
                files.append((stat.st_mtime, stat.st_size, file))
        total = sum(size for _, size, _ in files)
        for _, size, file in sorted(files):
            if total <= self.max_bytes:
                break
            with suppress(OSError):  # who has it mapped keeps it
                file.unlink()
                total -= size


def open_packed_cache(path: str, max_bytes: int, *, keep_all: bool = False) -> PackedCache | None:
    """The folder ``path``, that of the user (auto), or none (off)."""
    if path == "off":
        return None
    folder = cache_folder() / "packed" if path == "auto" else Path(path)
    return PackedCache(
        folder=folder, max_bytes=max_bytes, keep_random=path != "auto", keep_all=keep_all
    )


def _key(content: str, quantization: NumberFormat | None, level: str) -> str:
    # Plain C++ rounds products and sums apart where the others fuse them, and chooses other scales.
    parts = (content, quantization, ABI_VERSION, PACKING_VERSION, level == "generic")
    return hashlib.sha256(repr(parts).encode()).hexdigest()
