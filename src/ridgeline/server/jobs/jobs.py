"""Everything of files, batches and responses that a server holds."""

import asyncio
import sqlite3

from ridgeline.server.errors import ApiError
from ridgeline.server.jobs.batches import BatchStore
from ridgeline.server.jobs.database import TERMINAL, Database
from ridgeline.server.jobs.files import FileStore
from ridgeline.server.jobs.quotas import Quotas
from ridgeline.server.jobs.responses import ResponseStore


class Jobs:
    """The stores over one data folder, which is closed with them.

    ``changed`` is set when there is a new batch, or one is to be cancelled.
    """

    def __init__(self, database: Database, quotas: Quotas | None = None) -> None:
        self._database = database
        self.files = FileStore(self._database, quotas)
        self.batches = BatchStore(self._database, self.files, quotas)
        self.responses = ResponseStore(self._database)
        self.changed = asyncio.Event()

    async def delete_tenant(self, tenant: str) -> tuple[int, int]:
        """Remove a tenant's files, batches and responses; how many files and batches there were.

        Raises:
            ApiError: 409 while one of its batches is not over.
            DiskError: it may be asked for once more.
        """

        def work(db: sqlite3.Connection) -> tuple[list[str], int]:
            rows = db.execute("SELECT id, status FROM batches WHERE tenant = ?", (tenant,))
            batches = rows.fetchall()
            if any(row["status"] not in TERMINAL for row in batches):
                raise ApiError(409, "A batch of this tenant is not over.", code="in_use")
            for row in batches:
                db.execute("DELETE FROM results WHERE batch = ?", (row["id"],))
            db.execute("DELETE FROM batches WHERE tenant = ?", (tenant,))
            found = db.execute("SELECT id FROM files WHERE tenant = ?", (tenant,)).fetchall()
            db.execute("DELETE FROM files WHERE tenant = ?", (tenant,))
            db.execute("DELETE FROM responses WHERE tenant = ?", (tenant,))
            return [row["id"] for row in found], len(batches)

        files, batches = await self._database.run(work)
        for file_id in files:  # what a crash leaves is removed at the next start
            self.files.path(file_id).unlink(missing_ok=True)
        await self._database.erase()
        return len(files), batches

    def close(self) -> None:
        """Release the folder; what is unfinished goes on at the next start."""
        self._database.close()
