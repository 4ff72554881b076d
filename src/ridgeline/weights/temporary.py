"""Files and folders that are whole or not there: under temporary names until they are on disk."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ridgeline.core.errors import DiskError, InvalidRequestError
from ridgeline.weights.names import short_name

_BLOCK_BYTES = 1 << 24


def refuse_existing(path: Path) -> None:
    """Refuse to write over what is there, or where no folder is.

    Raises:
        InvalidRequestError: there is something at ``path``, or nothing that could hold it.
    """
    if os.path.lexists(path):
        raise InvalidRequestError(f"{path} exists already; name another.")
    if not path.absolute().parent.is_dir():
        raise InvalidRequestError(f"There is no folder {path.absolute().parent} to write into.")


def temporary_name(path: Path) -> Path:
    """A hidden name beside ``path``, of this process; what killed ones have left there goes."""
    prefix = f".{path.name}."
    with suppress(OSError):
        for each in path.absolute().parent.iterdir():
            number = each.name.removeprefix(prefix)
            if each.name.startswith(prefix) and number.isdecimal() and not _runs(int(number)):
                _remove(each)
    return path.with_name(f"{prefix}{os.getpid()}")


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


class NewFile:
    """A file of a size that is known, written at any offsets; it has a temporary name.

    Raises:
        DiskError: it cannot be written, or the disk has no room for it.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise unwritable(path, error) from None
        self._is_open = True
        try:
            os.posix_fallocate(self._file, 0, max(size_bytes, 1))
        except OSError as error:
            self.discard()
            raise unwritable(path, error) from None

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``, which is contiguous bytes."""
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, data[done:], offset + done)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def finish(self) -> None:
        """Close it, with its bytes on the disk."""
        try:
            os.fsync(self._file)
            self._is_open = False
            os.close(self._file)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def discard(self) -> None:
        """Close it, if it is open, and remove it, if it has its temporary name still."""
        with suppress(OSError):
            if self._is_open:
                self._is_open = False
                os.close(self._file)
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def write_durably(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    """Write a file piece by piece; a file of that name is replaced by the whole or stays.

    Raises:
        DiskError: it cannot be written; nothing is left of it.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        try:
            with temporary.open("wb") as file:
                for block in blocks:
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            publish(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise unwritable(path, error) from None


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON object as configuration files are; `write_durably`."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_durably(path, [text.encode()])


def copy_durably(source: Path, path: Path) -> None:
    """Copy a file's content; `write_durably`.

    Raises:
        DiskError: one cannot be read, or the other not be written.
    """

    def blocks() -> Iterator[bytes]:
        try:
            with source.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    yield block
        except OSError as error:
            raise DiskError(f"{source} could not be read: {error.strerror or error}.") from None

    write_durably(path, blocks())


def publish(temporary: Path, path: Path) -> None:
    """Give a file or folder, whose content is on the disk, its name, for good.

    Raises:
        DiskError: it cannot be renamed.
    """
    try:
        if temporary.is_dir():
            _sync_folder(temporary)
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error) from None


def _sync_folder(folder: Path) -> None:
    """Let the names in it be on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(path: Path, error: OSError) -> DiskError:
    """The error to raise for a write that failed."""
    return DiskError(f"{short_name(str(path))} could not be written: {error.strerror or error}.")
