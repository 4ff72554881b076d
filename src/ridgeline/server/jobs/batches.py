"""Batch jobs as rows: every change of state is a compare-and-set, every result is written once."""

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from ridgeline.core.encryption import Writer
from ridgeline.core.errors import DiskError
from ridgeline.server.errors import ApiError
from ridgeline.server.ids import new_id
from ridgeline.server.jobs.database import IS_OPEN, TERMINAL, Database, place_of, row_dict
from ridgeline.server.jobs.files import FileStore, StoredFile, WrittenFile
from ridgeline.server.jobs.quotas import Quotas

# From each state, where a batch may go. One that expires, or for whose results there is no room, is
# finalized first.
TRANSITIONS: dict[str, tuple[str, ...]] = {
    "validating": ("failed", "in_progress", "cancelling"),
    "in_progress": ("finalizing", "cancelling"),
    "finalizing": ("completed", "expired", "failed"),
    "cancelling": ("cancelled",),
}
_TIMES = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at", "archived_at",
)  # fmt: skip
MOST_OVER = 10_000  # that a tenant has; those before go
_PAGE_ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a line; ``body`` is the line of the output file, without its end."""

    line: int
    is_error: bool
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to work on a batch; a later lease of the same batch ends it."""

    batch: str
    epoch: int


class BatchStore:
    """The batches of all tenants."""

    def __init__(self, database: Database, files: FileStore, quotas: Quotas | None = None) -> None:
        self._database = database
        self._files = files
        self._quotas = quotas or Quotas()
        database.run_blocking(_delete_results_of_others)

    async def create(
        self,
        tenant: str,
        *,
        endpoint: str,
        input_file: str,
        window: str,
        window_s: int,
        metadata: dict[str, Any],
    ) -> dict[str, Any]:
        """A batch in state validating.

        Raises:
            ApiError: 404 if the file does not exist, 429 if the tenant has too many batches, 413 if
                this one has more lines than all may have.
        """

        def checked(db: sqlite3.Connection, lines: int) -> StoredFile:
            file = self._files.get_within(db, tenant, input_file, "input_file_id")
            if file.purpose != "batch":
                raise ApiError(400, "The file's purpose is not batch.", param="input_file_id")
            self._quotas.check_open(db, tenant, lines)
            return file

        def work(db: sqlite3.Connection) -> dict[str, Any]:
            checked(db, lines)
            batch_id = new_id("batch_")
            return self._insert(
                db, batch_id, tenant, endpoint, input_file, window, window_s, metadata, lines
            )

        file = await self._database.run(lambda db: checked(db, 0))
        lines = await asyncio.to_thread(self._files.num_lines, file)
        return await self._database.run(work)

    async def create_with_input(
        self,
        tenant: str,
        lines: bytes,
        *,
        endpoint: str,
        window: str,
        window_s: int,
        total: int,
        prefix: str,
    ) -> dict[str, Any]:
        """The same with a file of ``total`` lines that is stored with it; both or none are there.

        ``prefix``: of its id, and of the file's name. ApiError 413 if there is no room for it.
        """

        def check(db: sqlite3.Connection) -> None:
            self._quotas.check_open(db, tenant, total)
            self._quotas.check_room(db, tenant, len(lines))

        def work(db: sqlite3.Connection) -> dict[str, Any]:
            check(db)
            self._files.add_within(db, file, tenant, f"{prefix}input.jsonl", "batch")
            return self._insert(
                db, new_id(prefix), tenant, endpoint, file.id, window, window_s, {}, total
            )

        await self._database.run(check)
        file = await self._files.write(tenant, lambda writer: writer.write(lines))
        return await self._database.run(work, undo=lambda: self._files.discard(file))

    def _insert(
        self,
        db: sqlite3.Connection,
        batch_id: str,
        tenant: str,
        endpoint: str,
        input_file: str,
        window: str,
        window_s: int,
        metadata: dict[str, Any],
        total: int,
    ) -> dict[str, Any]:
        """Of those that are over, the tenant's oldest go for it."""
        now = int(time.time())
        db.execute(
            "INSERT INTO batches (id, tenant, endpoint, input_file, completion_window,"
            " metadata, status, created, expires, total)"
            " VALUES (?, ?, ?, ?, ?, ?, 'validating', ?, ?, ?)",
            (batch_id, tenant, endpoint, input_file, window,
             self._seal(json.dumps(metadata), "metadata", batch_id, tenant), now, now + window_s,
             total),
        )  # fmt: skip
        db.execute(
            "DELETE FROM batches WHERE rowid IN (SELECT rowid FROM batches WHERE tenant = ?"
            f" AND NOT {IS_OPEN} ORDER BY rowid DESC LIMIT -1 OFFSET {MOST_OVER})",
            (tenant,),
        )
        return self._json(self._row(db, batch_id, tenant))

    async def get(self, tenant: str, batch_id: str) -> dict[str, Any]:
        """A batch as OpenAI's clients read it; ApiError 404 if there is none."""
        return await self._database.run(lambda db: self._json(self._row(db, batch_id, tenant)))

    async def list(
        self,
        tenant: str,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int,
        prefix: str = "",
        params: tuple[str, str] = ("after", "before"),
    ) -> tuple[list[dict[str, Any]], bool]:
        """A page of the tenant's batches, newest first, and whether there are more.

        It begins behind the batch ``after``, or ends at the one ``before``, which a request names
        as ``params``; ``prefix``: of the ids. ApiError 400 if there is no such batch.
        """
        compare, direction = ("<", "DESC") if before is None else (">", "ASC")
        param = params[before is not None]

        def work(db: sqlite3.Connection) -> list[dict[str, Any]]:
            query = "SELECT * FROM batches WHERE tenant = ? AND id GLOB ?"
            values: list[Any] = [tenant, f"{prefix}*"]
            if (cursor := after if before is None else before) is not None:
                query += f" AND rowid {compare} ?"
                values.append(place_of(db, "batches", tenant, cursor, param, prefix))
            rows = db.execute(f"{query} ORDER BY rowid {direction} LIMIT ?", [*values, limit + 1])
            return [self._json(row) for row in rows.fetchall()]

        found = await self._database.run(work)
        page = found[:limit]
        return page if before is None else page[::-1], len(found) > limit

    async def cancel(self, tenant: str, batch_id: str) -> dict[str, Any]:
        """Begin to cancel; ApiError 409 if the batch is over or about to be."""

        def work(db: sqlite3.Connection) -> dict[str, Any]:
            row = self._row(db, batch_id, tenant)
            if row["status"] != "cancelling" and not move(db, batch_id, "cancelling"):
                raise ApiError(409, f"The batch is {row['status']}.", code="not_cancellable")
            return self._json(self._row(db, batch_id, tenant))

        return await self._database.run(work)

    async def delete(self, tenant: str, batch_id: str) -> None:
        """Delete a batch with its files; ApiError 409 if it, or another that reads one of these, is
        not over."""

        def work(db: sqlite3.Connection) -> list[str]:
            row = self._row(db, batch_id, tenant)
            if row["status"] not in TERMINAL:
                raise ApiError(409, "The batch is not over; cancel it first.", code="in_use")
            db.execute("DELETE FROM batches WHERE id = ?", (batch_id,))
            files = [row[f"{kind}_file"] for kind in ("input", "output", "error")]
            files = [file_id for file_id in files if file_id is not None]
            for file_id in files:
                self._files.delete_within(db, tenant, file_id)
            return files

        await self._files.erase(await self._database.run(work))

    async def unfinished(self) -> Sequence[str]:
        """Ids of the batches that still need work, oldest first."""

        def work(db: sqlite3.Connection) -> list[str]:
            query = f"SELECT id FROM batches INDEXED BY open_batches WHERE {IS_OPEN} ORDER BY rowid"
            return [row["id"] for row in db.execute(query)]

        return await self._database.run(work)

    async def claim(self, batch_id: str) -> tuple[Lease, dict[str, Any]]:
        """Take a batch over from whoever worked on it before; returns its row as well."""

        def work(db: sqlite3.Connection) -> tuple[Lease, dict[str, Any]]:
            db.execute("UPDATE batches SET epoch = epoch + 1 WHERE id = ?", (batch_id,))
            row = row_dict(self._row(db, batch_id))
            return Lease(batch=batch_id, epoch=row["epoch"]), row

        return await self._database.run(work)

    async def row(self, batch_id: str) -> dict[str, Any]:
        """A batch as it is stored."""
        return await self._database.run(lambda db: row_dict(self._row(db, batch_id)))

    async def move(self, lease: Lease, to: str, **columns: Any) -> bool:
        """Change the state, if the lease holds and the change is legal; False otherwise."""

        def work(db: sqlite3.Connection) -> bool:
            return _holds(db, lease) and move(db, lease.batch, to, **columns)

        return await self._database.run(work)

    async def fail(self, lease: Lease, errors: Sequence[dict[str, Any]]) -> bool:
        """End a batch for what is wrong with its input, as `move`."""

        def work(db: sqlite3.Connection) -> bool:
            tenant = self._row(db, lease.batch)["tenant"]
            sealed = self._sealed_errors(lease.batch, tenant, errors)
            return _holds(db, lease) and move(db, lease.batch, "failed", errors=sealed, total=0)

        return await self._database.run(work)

    async def done_lines(self, batch_id: str) -> set[int]:
        """Lines with a result."""
        return await self._database.run(
            lambda db: {
                row["line"]
                for row in db.execute("SELECT line FROM results WHERE batch = ?", (batch_id,))
            }
        )

    async def record(self, lease: Lease, results: Sequence[Result]) -> bool:
        """Write results; one that is there already stays. False if the batch no longer runs.

        One for which the tenant has no room ends the batch.
        """

        def work(db: sqlite3.Connection) -> bool:
            row = self._row(db, lease.batch)
            if not _holds(db, lease) or row["status"] != "in_progress":
                return False
            room = self._quotas.room_bytes(db, row["tenant"])
            ends = accumulate(len(each.body) + 1 for each in results)
            fitting = [each for each, end in zip(results, ends, strict=True) if end <= room]
            written = [each for each in fitting if self._insert_result(db, lease.batch, each)]
            if written:
                failed = sum(each.is_error for each in written)
                size = sum(len(each.body) + 1 for each in written)
                room -= size
                db.execute(
                    "UPDATE batches SET completed = completed + ?, failed = failed + ?,"
                    " result_bytes = result_bytes + ? WHERE id = ?",
                    (len(written) - failed, failed, size, lease.batch),
                )
            if len(fitting) == len(results):
                return True
            move(db, lease.batch, "finalizing", errors=self._no_room(row, room))
            return False

        return await self._database.run(work)

    def _insert_result(self, db: sqlite3.Connection, batch_id: str, result: Result) -> bool:
        """Whether there was none of that line."""
        name = _result_name(batch_id, result.line)
        body = self._database.encryption.seal(result.body, name)
        values = (batch_id, result.line, int(result.is_error), body)
        return db.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", values).rowcount == 1

    def _no_room(self, row: sqlite3.Row, room: int) -> str:
        """The column of errors of a batch whose results find no more room than that."""
        held = self._quotas.held_text(room)
        text = (
            f"{held}, which leaves no room for all results: delete some, and send the rest again."
        )
        error = {"code": "file_storage_limit", "message": text, "line": None, "param": None}
        return self._sealed_errors(row["id"], row["tenant"], [error])

    async def finish(
        self, lease: Lease, to: str, missing: Sequence[Result], total: int | None = None
    ) -> bool:
        """Write the output files from the results, and end the batch.

        ``missing`` stand in the error file for lines that have no result. Where there is no room
        for all of them none does, and the batch's errors say so. ``total``: how many lines there
        are, which a batch that was cancelled early does not know. The results themselves are
        deleted, and their counts kept. They may be many: they are read and deleted in pages, and
        others use the database in between. A crash leaves files without rows, or results of a batch
        that is over; the next start removes both. False if the batch may not end so.
        """

        def may_end(db: sqlite3.Connection, row: sqlite3.Row) -> bool:
            return _holds(db, lease) and to in TRANSITIONS.get(row["status"], ())

        def look(db: sqlite3.Connection) -> tuple[sqlite3.Row, int] | None:
            row = self._row(db, lease.batch)
            room = self._quotas.room_bytes(db, row["tenant"])
            return (row, room) if may_end(db, row) else None

        if (found := await self._database.run(look)) is None:
            return False
        row, room = found
        columns: dict[str, Any] = {"result_bytes": 0}
        if total is not None:
            columns["total"] = total
        if sum(len(each.body) + 1 for each in missing) > room:
            missing, columns["errors"] = (), self._no_room(row, room)
        written = await self._write_files(row, missing)

        def discard() -> None:
            self._files.discard(*written.values())

        def end(db: sqlite3.Connection) -> bool:
            if not may_end(db, self._row(db, lease.batch)):
                discard()
                return False
            for kind, file in written.items():
                name = f"{lease.batch}_{kind}.jsonl"
                self._files.add_within(db, file, row["tenant"], name, "batch_output")
                columns[f"{kind}_file"] = file.id
            return move(db, lease.batch, to, **columns)

        if not await self._database.run(end, undo=discard):
            return False
        with contextlib.suppress(DiskError):  # the next start, or deletion, tries again
            while await self._database.run(lambda db: _delete_results(db, lease.batch)):
                pass
            await self._database.erase()
        return True

    async def _write_files(
        self, row: sqlite3.Row, missing: Sequence[Result]
    ) -> dict[str, WrittenFile]:
        """The files of a batch that ends, by their kind; none without a line."""
        written: dict[str, WrittenFile] = {}
        try:
            if row["completed"]:
                write = partial(self._write_lines, row["id"], False, ())
                written["output"] = await self._files.write(row["tenant"], write)
            if row["failed"] or missing:
                write = partial(self._write_lines, row["id"], True, missing)
                written["error"] = await self._files.write(row["tenant"], write)
        except BaseException:
            self._files.discard(*written.values())
            raise
        return written

    def _write_lines(
        self, batch_id: str, is_error: bool, missing: Sequence[Result], writer: Writer
    ) -> None:
        """Write one of its files, in a thread that is not the database's."""
        unseal = self._database.encryption.unseal
        query = (
            "SELECT line, body FROM results WHERE batch = ? AND is_error = ? AND line > ?"
            f" ORDER BY line LIMIT {_PAGE_ROWS}"
        )
        line = -1

        def page(db: sqlite3.Connection) -> list[sqlite3.Row]:
            return db.execute(query, (batch_id, int(is_error), line)).fetchall()

        while rows := self._database.run_blocking(page):
            for row in rows:
                line = row["line"]
                writer.write(unseal(row["body"], _result_name(batch_id, line)) + b"\n")
        for result in missing:
            writer.write(result.body + b"\n")

    def _sealed_errors(self, batch_id: str, tenant: str, errors: Sequence[dict[str, Any]]) -> str:
        return self._seal(json.dumps(errors), "errors", batch_id, tenant)

    def _seal(self, text: str, column: str, batch_id: str, tenant: str) -> str:
        return self._database.encryption.seal_text(text, f"{column} {batch_id} {tenant}")

    def _unseal(self, row: sqlite3.Row, column: str) -> Any:
        """A column of JSON; ``None`` if it is empty."""
        if row[column] is None:
            return None
        name = f"{column} {row['id']} {row['tenant']}"
        unseal = self._database.encryption.unseal_text
        try:
            return json.loads(unseal(row[column], name))
        except (TypeError, ValueError) as error:
            raise sqlite3.DatabaseError(f"{column} of a batch is no JSON") from error

    def _row(self, db: sqlite3.Connection, batch_id: str, tenant: str | None = None) -> sqlite3.Row:
        row: sqlite3.Row | None = db.execute(
            "SELECT * FROM batches WHERE id = ?", (batch_id,)
        ).fetchone()
        if row is None or tenant not in (None, row["tenant"]):
            raise ApiError(404, "There is no such batch.", param="batch_id")
        return row

    def _json(self, row: sqlite3.Row) -> dict[str, Any]:
        errors = self._unseal(row, "errors")
        return {
            "id": row["id"],
            "object": "batch",
            "endpoint": row["endpoint"],
            "errors": None if errors is None else {"object": "list", "data": errors},
            "input_file_id": row["input_file"],
            "completion_window": row["completion_window"],
            "status": row["status"],
            "output_file_id": row["output_file"],
            "error_file_id": row["error_file"],
            "created_at": row["created"],
            "expires_at": row["expires"],
            **{name: row[name] for name in _TIMES},
            "request_counts": {
                "total": row["total"],
                "completed": row["completed"],
                "failed": row["failed"],
            },
            "metadata": self._unseal(row, "metadata"),
        }


def _result_name(batch_id: str, line: int) -> str:
    return f"result {batch_id} {line}"


def _delete_results_of_others(db: sqlite3.Connection) -> None:
    """Delete what a crash left of batches that are over."""
    is_over = f"batch NOT IN (SELECT id FROM batches WHERE {IS_OPEN})"
    db.execute(f"DELETE FROM results WHERE {is_over}")


def _delete_results(db: sqlite3.Connection, batch_id: str) -> bool:
    """Delete a page of a batch's results; were there any?"""
    page = f"SELECT rowid FROM results WHERE batch = ? LIMIT {_PAGE_ROWS}"
    deleted = db.execute(f"DELETE FROM results WHERE rowid IN ({page})", (batch_id,))
    return deleted.rowcount > 0


def move(db: sqlite3.Connection, batch_id: str, to: str, **columns: Any) -> bool:
    """Compare and set: from a state that may become ``to``, or not at all."""
    sources = [source for source, targets in TRANSITIONS.items() if to in targets]
    if not sources:
        return False
    columns = {"status": to, f"{to}_at": int(time.time()), **columns}
    settings = ", ".join(f"{name} = ?" for name in columns)
    marks = ", ".join("?" * len(sources))
    changed = db.execute(
        f"UPDATE batches SET {settings} WHERE id = ? AND status IN ({marks})",
        (*columns.values(), batch_id, *sources),
    )
    return changed.rowcount == 1


def _holds(db: sqlite3.Connection, lease: Lease) -> bool:
    query = "SELECT 1 FROM batches WHERE id = ? AND epoch = ?"
    return db.execute(query, (lease.batch, lease.epoch)).fetchone() is not None
