"""KV entries on disk: a file for each, in a folder for each tenant."""

import logging
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from ridgeline.core.durations import since_boot_s
from ridgeline.core.encryption import MAGIC, Encryption
from ridgeline.core.errors import CorruptFileError, DiskError
from ridgeline.kvcache.tiers.entry import (
    Entry,
    content_name,
    decode_entry,
    encode_entry,
    tenant_mark,
)
from ridgeline.kvcache.tiers.tier import LocalTier, TierUsage

_log = logging.getLogger(__name__)

_SUFFIX, _TEMPORARY = ".kv", ".tmp"
_ABANDONED_S = 3600.0  # a file that another process is writing is younger
T = TypeVar("T")


@dataclass(slots=True)
class _File:
    folder: str
    num_bytes: int
    used_s: float


class DiskTier(LocalTier):
    """See `Tier`. What is in the folder at the start is found again, the last use included.

    Files appear under their names whole (written aside, then renamed); what a crash or a full disk
    leaves of them is seen by its checksum and removed. Files are readable by their owner only. With
    ``encryption``, what lies there unencrypted is removed at the start, and what another key wrote
    is damaged.

    Raises:
        DiskError: the folder cannot be made or read.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        *,
        ttl_s: float | None = None,
        encryption: Encryption | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._ttl_s = ttl_s
        self._encryption = encryption or Encryption()
        self._clock = clock or _steady_clock()
        self._files: OrderedDict[bytes, _File] = OrderedDict()  # oldest first
        self._num_bytes = self._num_evicted = self._num_failures = 0
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._scan()
        except OSError as error:
            raise DiskError(f"{path} cannot hold KV blocks: {error.strerror}.") from error
        self._evict(0)

    def may_have(self, key: bytes) -> bool:
        return key in self._files

    def get(self, key: bytes) -> Entry | None:
        return self._read(key, _read_entry)

    def touch(self, key: bytes) -> bool:
        return bool(self._read(key, lambda _: True))  # it fails where the file is gone

    def put(self, entry: Entry) -> None:
        key = entry.header.key
        data = self._encryption.seal(encode_entry(entry), content_name(key))
        if len(data) > self._capacity_bytes:
            return
        self._remove(key)
        self._evict(len(data))
        folder = self._path / tenant_mark(entry.header.tenant)
        final = folder / (key.hex() + _SUFFIX)
        temporary = final.with_suffix(f".{os.getpid()}{_TEMPORARY}")
        try:
            folder.mkdir(exist_ok=True, mode=0o700)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(data)
            now_s = self._clock()
            os.utime(temporary, (now_s, now_s))
            temporary.replace(final)
        except OSError as error:
            self._fail(f"A KV block could not be written: {error.strerror}.")
            with suppress(OSError):
                temporary.unlink()
            return
        self._files[key] = _File(folder.name, len(data), now_s)
        self._num_bytes += len(data)

    def delete_tenant(self, tenant: str) -> bool:
        name = tenant_mark(tenant)
        keys = [key for key, file in self._files.items() if file.folder == name]
        for key in keys:
            self._num_bytes -= self._files.pop(key).num_bytes
        try:
            shutil.rmtree(self._path / name)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._fail(f"KV blocks could not be deleted: {error.strerror}.")
        return True

    def expire(self) -> None:
        self._evict(0)

    def usage(self) -> TierUsage:
        return TierUsage(
            name="disk",
            num_entries=len(self._files),
            num_bytes=self._num_bytes,
            capacity_bytes=self._capacity_bytes,
            num_evicted=self._num_evicted,
            num_failures=self._num_failures,
        )

    def close(self) -> None: ...

    def _scan(self) -> None:
        for folder in os.scandir(self._path):
            if folder.is_dir(follow_symlinks=False):
                with suppress(FileNotFoundError):  # another process removed it
                    for item in os.scandir(folder.path):
                        with suppress(FileNotFoundError):
                            self._find(folder.name, item)
        self._files = OrderedDict(sorted(self._files.items(), key=lambda each: each[1].used_s))
        self._num_bytes = sum(file.num_bytes for file in self._files.values())

    def _find(self, folder: str, item: os.DirEntry[str]) -> None:
        """Note the entry that a file holds, or remove what is of no use."""
        name, suffix = os.path.splitext(item.name)
        if suffix == _TEMPORARY:
            if item.stat().st_mtime < self._clock() - _ABANDONED_S:
                os.unlink(item)
        elif suffix == _SUFFIX and len(name) == 64 and set(name) <= set("0123456789abcdef"):
            if self._encryption.is_on and not _is_encrypted(Path(item.path)):
                os.unlink(item)
                return
            stat = item.stat(follow_symlinks=False)
            used_s = min(stat.st_mtime, self._clock())  # its clock may have been ahead
            self._files[bytes.fromhex(name)] = _File(folder, stat.st_size, used_s)

    def _read(self, key: bytes, read: Callable[[IO[bytes]], T]) -> T | None:
        self._evict(0)
        file = self._files.get(key)
        if file is None:
            return None
        path = self._file_path(key, file)
        try:
            with path.open("rb") as plain:
                found = read(self._encryption.reader(plain, content_name(key)))
            file.used_s = self._clock()
            os.utime(path, (file.used_s, file.used_s))
        except CorruptFileError as error:
            self._fail(str(error))
            self._remove(key)
            return None
        except OSError:  # removed by another process
            self._remove(key)
            return None
        self._files.move_to_end(key)
        return found

    def _evict(self, needed_bytes: int) -> None:
        """Remove what has expired, and the oldest until there is room."""
        while self._files:
            key, file = next(iter(self._files.items()))
            expired = self._ttl_s is not None and file.used_s + self._ttl_s <= self._clock()
            if not expired and self._num_bytes + needed_bytes <= self._capacity_bytes:
                return
            self._remove(key)
            self._num_evicted += 1

    def _remove(self, key: bytes) -> None:
        file = self._files.pop(key, None)
        if file is None:
            return
        self._num_bytes -= file.num_bytes
        try:
            self._file_path(key, file).unlink(missing_ok=True)
        except OSError as error:
            self._fail(f"A KV block could not be removed: {error.strerror}.")

    def _file_path(self, key: bytes, file: _File) -> Path:
        return self._path / file.folder / (key.hex() + _SUFFIX)

    def _fail(self, message: str) -> None:
        if not self._num_failures:
            _log.warning("%s Further failures of the disk tier are counted only.", message)
        self._num_failures += 1


def _steady_clock() -> Callable[[], float]:
    """The time of day, of which later changes to the machine's clock are not seen."""
    offset_s = time.time() - since_boot_s()
    return lambda: offset_s + since_boot_s()


def _is_encrypted(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _read_entry(file: IO[bytes]) -> Entry:
    return decode_entry(file.read())
