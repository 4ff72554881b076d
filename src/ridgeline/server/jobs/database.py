"""The SQLite database of a data folder, used by one process and one thread at a time."""

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
import stat
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.core.durations import since_boot_s
from ridgeline.core.encryption import Encryption, Writer
from ridgeline.core.errors import (
    CorruptFileError,
    DiskError,
    InvalidRequestError,
    RidgelineError,
    SettingsError,
)
from ridgeline.server.errors import ApiError

_log = logging.getLogger(__name__)
T = TypeVar("T")
NAME = "jobs.sqlite"
_CLOCK_SET_S = 2.0  # smaller steps are what keeps it right
_CHECK = "ridgeline data folder"  # what the key of an encrypted folder has to decrypt
TERMINAL = ("failed", "completed", "expired", "cancelled")
# Of a batch that is not over. An index has these words: others need another index.
IS_OPEN = f"status NOT IN {TERMINAL}"

# A batch has its counts in its row; results become files, and are deleted, when it is over.
_SCHEMA = f"""
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
    expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    result_bytes INTEGER NOT NULL DEFAULT 0, archived_at INTEGER
) STRICT;
CREATE TABLE IF NOT EXISTS results (
    batch TEXT NOT NULL, line INTEGER NOT NULL, is_error INTEGER NOT NULL, body BLOB NOT NULL,
    UNIQUE (batch, line)
) STRICT;
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created INTEGER NOT NULL, expires INTEGER NOT NULL,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS files_of_tenant ON files (tenant);
CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches (tenant);
CREATE INDEX IF NOT EXISTS open_batches ON batches (tenant) WHERE {IS_OPEN};
CREATE INDEX IF NOT EXISTS responses_of_tenant ON responses (tenant, created);
CREATE INDEX IF NOT EXISTS responses_by_expiry ON responses (expires);
CREATE TABLE IF NOT EXISTS encryption (key_check BLOB NOT NULL) STRICT;
"""

# What each tenant's files take in all, counted anew at each start.
_HELD = """
CREATE TEMP TABLE held (tenant TEXT PRIMARY KEY, files INTEGER, bytes INTEGER);
INSERT INTO held SELECT tenant, COUNT(*), SUM(bytes) FROM files GROUP BY tenant;
CREATE TEMP TRIGGER held_more AFTER INSERT ON files BEGIN
    INSERT INTO held VALUES (NEW.tenant, 1, NEW.bytes)
    ON CONFLICT DO UPDATE SET files = files + 1, bytes = bytes + NEW.bytes;
END;
CREATE TEMP TRIGGER held_less AFTER DELETE ON files BEGIN
    UPDATE held SET files = files - 1, bytes = bytes - OLD.bytes WHERE tenant = OLD.tenant;
END;
"""

# What a batch's row counts of its results.
_COUNTS = {
    "completed": "COUNT(*) FILTER (WHERE NOT is_error)",
    "failed": "COUNT(*) FILTER (WHERE is_error)",
    "result_bytes": "COALESCE(SUM(LENGTH(body) + 1), 0)",
}

# What SQLite raises for a file that is damaged, and what Python does for texts in it.
DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)


class Database:
    """Runs functions on the connection, each in a transaction of its own, in a thread of its own.

    A transaction is on disk when `run` returns (WAL, synchronous=FULL).

    What is in the folder is for its owner alone; a folder that is not gets a warning. With a key,
    callers encrypt what users have written before they store it, with ``encryption``; a folder is
    encrypted from its start, or not at all. Should the machine's clock be set meanwhile, what has a
    time to live keeps it: its dates are moved before the next transaction's work.

    Raises:
        DiskError: the folder cannot be used, or the database is damaged.
        InvalidRequestError: another server uses it.
        SettingsError: it is encrypted with another key, or not encrypted and a key is given.
    """

    def __init__(self, folder: Path, encryption: Encryption | None = None) -> None:
        self.folder = folder
        self.encryption = encryption or Encryption()
        self._offset_s = time.time() - since_boot_s()
        self._is_open = True
        try:
            for each in reversed((folder, *folder.parents)):
                each.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise InvalidRequestError(
                f"Another server uses the data folder {folder}; give this one another --data-dir."
            ) from error
        except OSError as error:
            raise DiskError(
                f"The data folder {folder} cannot be used: {error.strerror}."
            ) from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ridgeline-jobs")
        try:
            self._protect()
            self._connection = self._thread.submit(self._open).result()
        except (*DAMAGE, OSError) as error:
            self._release()
            raise self._problem(error) from error
        try:
            self.run_blocking(self._check_key)
        except RidgelineError:
            self.close()
            raise

    def _protect(self) -> None:
        mode = stat.S_IMODE(self.folder.stat().st_mode)
        if mode & 0o077:
            _log.warning(
                "The data folder %s is open to other users (mode %04o); make it 0700.",
                self.folder, mode,
            )  # fmt: skip
        # SQLite gives its other files the mode of the database.
        os.close(os.open(self.folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for path in (self.folder / "lock", *self.folder.glob(f"{NAME}*")):
            path.chmod(0o600)

    def _problem(self, error: Exception) -> DiskError:
        """What to say of an error of SQLite's or of the disk's."""
        path = self.folder / NAME
        match error:
            case OSError():
                return DiskError(f"{self.folder} cannot be used: {error.strerror}.")
            case sqlite3.OperationalError():  # no room, no permission, no answer of the disk
                return DiskError(f"The database {path} cannot be used: {error}.")
        return DiskError(
            f"The database {path} is damaged ({error}); put a copy in its place, or move it away "
            "to begin anew without its files and batches."
        )

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.folder / NAME, isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA secure_delete=ON")  # results are users' texts
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.executescript(_SCHEMA)
        _check_tables(connection)
        _add_columns(connection)
        connection.executescript(_HELD)
        return connection

    def _check_key(self, db: sqlite3.Connection) -> None:
        row = db.execute("SELECT key_check FROM encryption").fetchone()
        if row is None and self.encryption.is_on:
            kept = " UNION ALL ".join(
                f"SELECT 1 FROM {t}" for t in ("files", "batches", "responses")
            )
            if db.execute(kept).fetchone():
                raise SettingsError(
                    f"The data folder {self.folder} has files that are not encrypted; encryption "
                    "begins with an empty --data-dir."
                )
            check = self.encryption.seal(_CHECK.encode(), _CHECK)
            db.execute("INSERT INTO encryption VALUES (?)", (check,))
        elif row is not None and not self.encryption.is_on:
            raise SettingsError(
                f"The data folder {self.folder} is encrypted; give its --encryption-key-file."
            )
        elif row is not None:
            try:
                self.encryption.unseal(row["key_check"], _CHECK)
            except CorruptFileError:
                raise SettingsError(
                    f"The data folder {self.folder} is encrypted with another key."
                ) from None

    async def run(
        self, work: Callable[[sqlite3.Connection], T], undo: Callable[[], None] | None = None
    ) -> T:
        """Do ``work`` in one transaction.

        ``undo`` takes back what is outside the database: in the database's thread, if the
        transaction fails, or at once, if it is cancelled before it begins.

        Raises:
            DiskError: it could not be written, of which nothing was, or the database is damaged.
        """
        running = self._thread.submit(self._transaction, work)

        def ended(running: Future[T]) -> None:
            if undo is not None and (running.cancelled() or running.exception() is not None):
                undo()

        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    def run_blocking(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The same for callers without an event loop."""
        return self._thread.submit(self._transaction, work).result()

    async def erase(self) -> None:
        """Make what was deleted vanish from the disk, where the log of changes still has it.

        Raises:
            DiskError: the database could not be written.
        """

        def checkpoint() -> None:
            try:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.DatabaseError as error:
                raise self._problem(error) from error

        await asyncio.get_running_loop().run_in_executor(self._thread, checkpoint)

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        offset_s = time.time() - since_boot_s()
        was_set = abs(offset_s - self._offset_s) > _CLOCK_SET_S
        try:
            connection.execute("BEGIN IMMEDIATE")
            if was_set:
                _move_dates(connection, round(offset_s - self._offset_s))
            result = work(connection)
            connection.execute("COMMIT")
            if was_set:
                self._offset_s = offset_s
        except BaseException as error:
            if connection.in_transaction:  # SQLite may have ended it itself
                with contextlib.suppress(sqlite3.DatabaseError):
                    connection.execute("ROLLBACK")
            if isinstance(error, (*DAMAGE, OSError)):
                raise self._problem(error) from error
            raise
        return result

    def close(self) -> None:
        """Finish what runs, then release the folder; nothing if that was done."""
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.suppress(sqlite3.DatabaseError):
            self._thread.submit(self._connection.close).result()
        self._release()

    def _release(self) -> None:
        self._thread.shutdown()
        os.close(self._lock)


def _check_tables(connection: sqlite3.Connection) -> None:
    """Raise sqlite3.DatabaseError if a table and its indexes do not agree: files without a row are
    removed, and a row that is damaged must not cost a file. Results, which may be many, are left
    out."""
    for table in ("files", "batches", "encryption"):
        (found,) = connection.execute(f"PRAGMA integrity_check({table})").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found.partition("\n")[0])


def _add_columns(connection: sqlite3.Connection) -> None:
    """A folder may be of a version that counted results whenever it was asked."""
    columns = {row["name"] for row in connection.execute("PRAGMA table_info(batches)")}
    connection.execute("BEGIN")
    if "archived_at" not in columns:
        connection.execute("ALTER TABLE batches ADD COLUMN archived_at INTEGER")
    for name, of_results in _COUNTS.items():
        if name not in columns:
            connection.execute(f"ALTER TABLE batches ADD COLUMN {name} INTEGER NOT NULL DEFAULT 0")
        if "result_bytes" not in columns:
            connection.execute(
                f"UPDATE batches SET {name} = {name} + (SELECT {of_results} FROM results"
                " WHERE batch = batches.id)"
            )
    connection.execute("COMMIT")


def _move_dates(connection: sqlite3.Connection, by_s: int) -> None:
    """Let responses, and batches that are not over, expire when they would have."""
    move = "SET created = created + ?1, expires = expires + ?1"
    connection.execute(f"UPDATE responses {move}", (by_s,))
    ends = "COALESCE(completed_at, failed_at, expired_at, cancelled_at)"
    connection.execute(f"UPDATE batches {move} WHERE {ends} IS NULL", (by_s,))


def row_dict(row: sqlite3.Row) -> dict[str, Any]:
    """A row by its columns' names."""
    return dict(zip(row.keys(), row, strict=True))


def place_of(
    db: sqlite3.Connection, table: str, tenant: str, item_id: str, param: str, prefix: str = ""
) -> int:
    """Where a list goes on from an item of the tenant's, which a request names as ``param``;
    ApiError 400 if the list, of ids with a ``prefix``, has none of that id."""
    query = f"SELECT rowid FROM {table} WHERE id = ? AND tenant = ? AND id GLOB ?"
    row = db.execute(query, (item_id, tenant, f"{prefix}*")).fetchone()
    if row is None:
        text = f"{param}: there is no {item_id[:80]!r} for the list to go on from."
        raise ApiError(400, text, param=param)
    return int(row[0])


def write_durably(
    path: Path, write: Callable[[Writer], None], encryption: Encryption, name: str
) -> int:
    """Create a file that is whole or not there: temporary, fsync, rename, fsync of the folder.

    ``write`` gets what writes to the file, under a name. Returns the size of the content in bytes.

    Raises:
        DiskError: there is no room, or no permission.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        try:
            with open(temporary, "xb") as file:
                writer = encryption.writer(file, name)
                write(writer)
                writer.finish()
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
            sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DiskError(f"A file could not be written: {error.strerror}.") from error
    return writer.size


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
