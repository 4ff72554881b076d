"""Where the files and batches of a server lie."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from ridgeline.core.encryption import Encryption
from ridgeline.core.errors import DiskError
from ridgeline.server.config import ServerConfig
from ridgeline.server.jobs.database import NAME, Database

_log = logging.getLogger(__name__)


def open_data_folder(config: ServerConfig, port: int) -> Database:
    """The data folder of a server that listens on ``port``, for it alone.

    Raises what `Database`, `Encryption.from_file` and `default_folder` raise.
    """
    encryption = Encryption.from_file(config.encryption_key_file)
    return Database(Path(config.data_dir or default_folder(port)), encryption)


def open_existing_folder(config: ServerConfig, port: int) -> Database | None:
    """The same if there is one: a start that is refused leaves none behind.

    Raises:
        DiskError: it would be where no folder can be made.
    """
    folder = Path(config.data_dir or default_folder(port))
    if os.path.exists(folder):  # which says no where it may not look
        return open_data_folder(config, port)
    Encryption.from_file(config.encryption_key_file)
    parent = next(each for each in folder.absolute().parents if os.path.exists(each))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise DiskError(f"The data folder {folder} cannot be used: {parent} cannot be written.")
    return None


def default_folder(port: int) -> Path:
    """Where data lies without ``--data-dir``: servers of one user differ by their ports.

    Once all ports had one folder. The first server that finds it unused makes it its own.

    Raises:
        DiskError: it cannot be moved.
    """
    base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    folder, shared = base / f"ridgeline-{port}", base / "ridgeline"
    if not os.path.exists(shared / NAME):
        return folder
    with _unused(shared) as is_unused:
        if not is_unused or os.path.exists(folder / NAME):
            _log.warning("Files and batches in %s are not served; --data-dir does that.", shared)
            return folder
        try:
            shared.rename(folder)  # in one step: no crash leaves a part of it behind
        except FileNotFoundError:  # another server has just done so
            return folder
        except OSError as error:
            raise DiskError(
                f"The data folder {shared} cannot become {folder}: {error.strerror}. Use it with "
                f"--data-dir {shared}, or give another."
            ) from error
    _log.warning("The data folder %s has become %s: each port has its own.", shared, folder)
    return folder


@contextlib.contextmanager
def _unused(folder: Path) -> Iterator[bool]:
    """Whether no server uses a folder; if so, none begins to within the block."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # of another user, or just renamed
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)
