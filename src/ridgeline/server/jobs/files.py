"""Uploaded and produced files: a row each, and a file whose name the server made."""

import asyncio
import contextlib
import re
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from ridgeline.core.encryption import Writer
from ridgeline.core.errors import CorruptFileError, DiskError
from ridgeline.server.errors import ApiError
from ridgeline.server.ids import new_id
from ridgeline.server.jobs.database import (
    IS_OPEN,
    Database,
    place_of,
    row_dict,
    sync_folder,
    write_durably,
)
from ridgeline.server.jobs.quotas import Quotas

MAX_FILE_BYTES = 512 << 20
MAX_INPUT_BYTES = 200 << 20  # of a batch
MAX_LINE_BYTES = 16 << 20  # of its input
_MAX_FILENAME_CHARS = 255
_ID = re.compile(r"file-[0-9a-f]{24}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """``filename`` is what the client called it, and nothing but a column."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created: int

    def json(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file on disk that has no row yet, and the bytes of its content."""

    id: str
    bytes: int


@dataclass(slots=True)
class _Arriving:
    """A tenant's uploads in progress: their bytes so far, and how many there is room for."""

    room: int
    size: int = 0
    uploads: int = 0


class FileStore:
    """Files of all tenants; one never sees another's. Without ``quotas`` they have no bounds.

    Raises:
        DiskError: the folder cannot be used, or the database is damaged.
    """

    def __init__(self, database: Database, quotas: Quotas | None = None) -> None:
        self._database = database
        self._quotas = quotas or Quotas()
        self._arriving: dict[str, _Arriving] = {}  # by tenant
        self._counting = threading.Lock()
        self._folder = database.folder / "files"
        database.run_blocking(self._clean)

    def _clean(self, db: sqlite3.Connection) -> None:
        """Make the folder, and remove what a crash left before its row was written."""
        self._folder.mkdir(exist_ok=True, mode=0o700)
        self._folder.chmod(0o700)
        known = {row["id"] for row in db.execute("SELECT id FROM files")}
        for path in self._folder.iterdir():
            if path.name not in known:
                path.unlink()

    def path(self, file_id: str) -> Path:
        """Where the content lies; only for ids that came from a row, or from `new_id`."""
        assert _ID.fullmatch(file_id)
        return self._folder / file_id

    async def add(
        self, tenant: str, filename: str, purpose: str, write: Callable[[Writer], None]
    ) -> StoredFile:
        """Store a file; it is durable when this returns. ``write`` runs in a thread.

        Raises:
            DiskError: it could not be stored; nothing is left of it.
        """
        written = await self.write(tenant, write)
        return await self._database.run(
            lambda db: self.add_within(db, written, tenant, filename, purpose),
            undo=lambda: self.discard(written),
        )

    async def write(self, tenant: str, write: Callable[[Writer], None]) -> WrittenFile:
        """Write a file that has no row yet, for `add_within` or `discard`; a start removes those
        for which neither came. ``write`` runs in a thread, to its end where this is cancelled: what
        it made is removed then. Raises as `add`."""
        file_id = new_id("file-")
        path, encryption = self.path(file_id), self._database.encryption
        name = _content_name(tenant, file_id)
        writing = asyncio.ensure_future(
            asyncio.to_thread(write_durably, path, write, encryption, name)
        )
        try:
            return WrittenFile(id=file_id, bytes=await asyncio.shield(writing))
        except asyncio.CancelledError:
            writing.add_done_callback(lambda _: path.unlink(missing_ok=True))
            raise

    def add_within(
        self,
        db: sqlite3.Connection,
        written: WrittenFile,
        tenant: str,
        filename: str,
        purpose: str,
    ) -> StoredFile:
        """Give a file its row, in a transaction that discards it if it fails."""
        return self._insert(db, written.id, tenant, filename, purpose, written.bytes)

    def discard(self, *written: WrittenFile) -> None:
        """Remove files that get no row."""
        for each in written:
            self._unlink(each.id)

    def _unlink(self, file_id: str) -> None:
        with contextlib.suppress(OSError):  # what has no row goes at the next start
            self.path(file_id).unlink()

    @contextlib.asynccontextmanager
    async def arriving(self, tenant: str) -> AsyncIterator[Callable[[int], None]]:
        """Within it an upload is written, of which each piece is counted before, and adopted.

        Raises (when one is counted, as well):
            ApiError: 413 if the tenant's files and uploads leave no room for it.
        """
        room = await self._database.run(lambda db: self._quotas.check_room(db, tenant, 1))
        arriving = self._arriving.setdefault(tenant, _Arriving(room))
        arriving.room = room
        arriving.uploads += 1
        own = 0

        def count(size: int) -> None:
            nonlocal own
            own += size
            with self._counting:
                arriving.size += size
                if arriving.size > arriving.room:
                    raise self._quotas.no_room(arriving.room, "your uploads so far leave no room")

        adopted = 0
        try:
            yield count
            adopted = own
        finally:
            with self._counting:
                arriving.size -= own
                arriving.room -= adopted
            arriving.uploads -= 1
            if not arriving.uploads:
                del self._arriving[tenant]

    async def adopt(
        self, file_id: str, tenant: str, filename: str, purpose: str, size: int
    ) -> StoredFile:
        """Take over an upload that is complete and synced; ApiError 413 if there is no room."""

        def work(db: sqlite3.Connection) -> StoredFile:
            self._quotas.check_room(db, tenant, size)
            self.temporary(file_id).rename(self.path(file_id))
            sync_folder(self._folder)
            return self._insert(db, file_id, tenant, filename, purpose, size)

        return await self._database.run(work, undo=lambda: self._unlink(file_id))

    def temporary(self, file_id: str) -> Path:
        """Where an upload is written before it is complete."""
        return self.path(file_id).with_suffix(".upload")

    def writer(self, file: IO[bytes], tenant: str, file_id: str) -> Writer:
        """Writes a tenant's upload to its temporary file."""
        return self._database.encryption.writer(file, _content_name(tenant, file_id))

    def reader(self, tenant: str, file_id: str) -> IO[bytes]:
        """The content of a tenant's file, of which there is a row.

        Raises (when it is read, as well):
            DiskError: it is not there.
            CorruptFileError: it is damaged, or not encrypted as the others are.
        """
        try:
            file = open(self.path(file_id), "rb")  # noqa: SIM115
        except OSError as error:
            raise DiskError(f"A file cannot be read: {error.strerror}.") from error
        name = _content_name(tenant, file_id)
        return self._database.encryption.reader(file, name)

    def num_lines(self, file: StoredFile) -> int:
        """Lines that are not blank of the input of a batch; 0 if it cannot be read, or is too
        large, for which the batch fails before a line is read."""
        if file.bytes > MAX_INPUT_BYTES:
            return 0
        with (
            contextlib.suppress(DiskError, CorruptFileError),
            self.reader(file.tenant, file.id) as content,
        ):
            lines = iter(partial(content.readline, MAX_LINE_BYTES), b"")
            return sum(not line.isspace() for line in lines)
        return 0

    def _insert(
        self, db: sqlite3.Connection, file_id: str, tenant: str, name: str, purpose: str, size: int
    ) -> StoredFile:
        file = StoredFile(
            id=file_id,
            tenant=tenant,
            filename=name[:_MAX_FILENAME_CHARS],
            purpose=purpose,
            bytes=size,
            created=int(time.time()),
        )
        sealed = self._database.encryption.seal_text(file.filename, _filename_name(tenant, file.id))
        row = (file.id, tenant, sealed, purpose, size, file.created)
        db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", row)
        return file

    async def get(self, tenant: str, file_id: str) -> StoredFile:
        """A file of a tenant; ApiError 404 if there is none."""
        return await self._database.run(lambda db: self.get_within(db, tenant, file_id))

    def get_within(
        self, db: sqlite3.Connection, tenant: str, file_id: str, param: str = "file_id"
    ) -> StoredFile:
        """The same within a transaction; ``param``: how the request calls the id."""
        row = db.execute(
            "SELECT * FROM files WHERE id = ? AND tenant = ?", (file_id, tenant)
        ).fetchone()
        if row is None:
            raise ApiError(404, "There is no such file.", param=param)
        return self._stored(row)

    def _stored(self, row: sqlite3.Row) -> StoredFile:
        values = row_dict(row)
        name = _filename_name(values["tenant"], values["id"])
        values["filename"] = self._database.encryption.unseal_text(values["filename"], name)
        return StoredFile(**values)

    async def list(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, order: str
    ) -> tuple[list[StoredFile], bool]:
        """A page of the tenant's files behind ``after``, and whether there are more; ApiError 400
        if there is no such file."""
        newest_first = order == "desc"
        compare, direction = ("<", "DESC") if newest_first else (">", "ASC")

        def work(db: sqlite3.Connection) -> list[StoredFile]:
            query = "SELECT * FROM files WHERE tenant = ?"
            values: list[Any] = [tenant]
            if purpose is not None:
                query += " AND purpose = ?"
                values.append(purpose)
            if after is not None:
                query += f" AND rowid {compare} ?"
                values.append(place_of(db, "files", tenant, after, "after"))
            query += f" ORDER BY rowid {direction} LIMIT ?"
            rows = db.execute(query, [*values, limit + 1])
            return [self._stored(row) for row in rows]

        found = await self._database.run(work)
        return found[:limit], len(found) > limit

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file.

        Raises:
            ApiError: 404 if there is none, 409 while a batch reads it.
        """

        def work(db: sqlite3.Connection) -> None:
            self.get_within(db, tenant, file_id)
            self.delete_within(db, tenant, file_id)

        await self._database.run(work)
        await self.erase([file_id])

    def delete_within(self, db: sqlite3.Connection, tenant: str, file_id: str) -> None:
        """Delete a file's row, if there is one, within a transaction that does more; `erase` is to
        follow. A batch whose results it has is archived. ApiError 409 while a batch reads it."""
        reading = f"SELECT 1 FROM batches WHERE tenant = ? AND input_file = ? AND {IS_OPEN}"
        if db.execute(reading, (tenant, file_id)).fetchone() is not None:
            raise ApiError(409, "A batch that is not over reads this file.", code="in_use")
        db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        db.execute(
            "UPDATE batches SET archived_at = ? WHERE tenant = ? AND archived_at IS NULL"
            " AND ? IN (output_file, error_file)",
            (int(time.time()), tenant, file_id),
        )

    async def erase(self, file_ids: Sequence[str]) -> None:
        """Remove the content of files whose rows are deleted, and what the database had of them."""
        for file_id in file_ids:
            self._unlink(file_id)
        with contextlib.suppress(DiskError):  # the next deletion tries again
            await self._database.erase()


def _content_name(tenant: str, file_id: str) -> str:
    return f"content {file_id} {tenant}"


def _filename_name(tenant: str, file_id: str) -> str:
    return f"filename {file_id} {tenant}"
