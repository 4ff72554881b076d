"""Opening and reading files of weights, every failure told as one of Ridgeline's errors."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from ridgeline.core.errors import CorruptFileError, DiskError, ModelNotFoundError


def open_file(path: Path) -> tuple[BinaryIO, int]:
    """The open file and its size in bytes.

    Raises:
        ModelNotFoundError: there is no such file, or it is a folder, a pipe or the like.
        DiskError: it cannot be opened.
    """
    try:
        # Looked at before it is opened: opening a pipe would wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelNotFoundError(f"{path} is not a regular file.")
        file = path.open("rb")
        return file, os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise ModelNotFoundError(f"There is no file {path}.") from None
    except OSError as error:
        raise unreadable(path, error) from None


def read_exactly(file: BinaryIO, path: Path, offset: int, buffer: memoryview) -> None:
    """Fill ``buffer`` from ``offset``; plain reads, so that a shrunk file is no crash.

    Raises:
        CorruptFileError: the file has become shorter since it was opened.
        DiskError: it cannot be read.
    """
    done = 0
    while done < len(buffer):
        try:
            got = os.preadv(file.fileno(), [buffer[done:]], offset + done)
        except OSError as error:
            raise unreadable(path, error) from None
        if got == 0:
            raise CorruptFileError(f"{path.name} became shorter while it was being read.")
        done += got


def unreadable(path: Path, error: Exception) -> DiskError:
    """The error to raise for a read that failed."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DiskError(f"{path} could not be read: {reason}.")
