"""Files that are whole or not there: written under a temporary name, synced, then renamed."""

import os
from pathlib import Path

from ridgeline.core.errors import DiskError, InvalidRequestError
from ridgeline.weights.names import short_name
from ridgeline.weights.safetensors_writing import replace_durably


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
    """A hidden name beside ``path``, of this process."""
    return path.with_name(f".{path.name}.{os.getpid()}")


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
        try:
            os.posix_fallocate(self._file, 0, max(size_bytes, 1))
        except OSError as error:
            os.close(self._file)
            path.unlink(missing_ok=True)
            raise unwritable(path, error) from None

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``, which is contiguous bytes."""
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, data[done:], offset + done)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def close(self, *, sync: bool) -> None:
        """Close it, its bytes on the disk first if ``sync``."""
        try:
            if sync:
                os.fsync(self._file)
            os.close(self._file)
        except OSError as error:
            raise unwritable(self.path, error) from None


def publish(temporary: Path, path: Path) -> None:
    """Give a file or folder its name, for good.

    Raises:
        DiskError: it cannot be renamed.
    """
    try:
        replace_durably(temporary, path)
    except OSError as error:
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> DiskError:
    """The error to raise for a write that failed."""
    return DiskError(f"{short_name(str(path))} could not be written: {error.strerror or error}.")
