"""The SQLite database of a data folder, used by one process and one thread at a time."""

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.core.errors import DiskError, InvalidRequestError

T = TypeVar("T")

# A batch that is over has its counts in its row, and no results.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, created INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL,
    completion_window TEXT NOT NULL, metadata TEXT NOT NULL, status TEXT NOT NULL,
    created INTEGER NOT NULL, expires INTEGER NOT NULL, epoch INTEGER NOT NULL DEFAULT 0,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, output_file TEXT, error_file TEXT, errors TEXT,
    in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER,
    expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER
) STRICT;
CREATE TABLE IF NOT EXISTS results (
    batch TEXT NOT NULL, line INTEGER NOT NULL, is_error INTEGER NOT NULL, body BLOB NOT NULL,
    UNIQUE (batch, line)
) STRICT;
"""


class Database:
    """Runs functions on the connection, each in a transaction of its own, in a thread of its own.

    A transaction is on disk when `run` returns (WAL, synchronous=FULL).

    Raises:
        DiskError: the folder cannot be used.
        InvalidRequestError: another server uses it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidRequestError(
                f"Another server uses the data folder {folder}; give this one another --data-dir."
            ) from error
        except OSError as error:
            raise DiskError(
                f"The data folder {folder} cannot be used: {error.strerror}."
            ) from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ridgeline-jobs")
        self._connection = self._thread.submit(self._open).result()

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.folder / "jobs.sqlite", isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA secure_delete=ON")  # results are users' texts
        connection.executescript(_SCHEMA)
        _add_counts(connection)
        return connection

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do ``work`` in one transaction.

        Raises:
            DiskError: it could not be written; nothing of it was.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._transaction, work
        )

    def run_blocking(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The same for callers without an event loop."""
        return self._thread.submit(self._transaction, work).result()

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise DiskError("The data folder cannot be written.") from error
        return result

    def close(self) -> None:
        """Finish what runs, then release the folder."""
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()
        os.close(self._lock)


def _add_counts(connection: sqlite3.Connection) -> None:
    """A folder may be of a version that counted results, and never deleted them."""
    columns = {row["name"] for row in connection.execute("PRAGMA table_info(batches)")}
    for name in {"completed", "failed"} - columns:
        connection.execute(f"ALTER TABLE batches ADD COLUMN {name} INTEGER NOT NULL DEFAULT 0")


def row_dict(row: sqlite3.Row) -> dict[str, Any]:
    """A row by its columns' names."""
    return dict(zip(row.keys(), row, strict=True))


def write_durably(path: Path, write: Callable[[Any], None]) -> int:
    """Create a file that is whole or not there: temporary, fsync, rename, fsync of the folder.

    ``write`` gets the open file. Returns the size in bytes.

    Raises:
        DiskError: there is no room, or no permission.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        try:
            with open(temporary, "xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            temporary.rename(path)
            sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DiskError(f"A file could not be written: {error.strerror}.") from error
    return size


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
