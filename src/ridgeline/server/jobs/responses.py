"""Responses that are kept so that later ones go on from them: each key's own, for a time."""

import sqlite3
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from ridgeline.server.errors import ApiError
from ridgeline.server.jobs.database import Database

MAX_KEPT = 10_000  # of one tenant; the oldest go first


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """``response`` is what was answered; ``items`` all of the conversation, its output included."""

    response: dict[str, Any]
    items: list[dict[str, Any]]


class ResponseStore:
    """Reads and writes them. Nobody finds those of another tenant, nor any after their time."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, tenant: str, kept: KeptResponse, *, ttl_s: float) -> None:
        """Keep a response; it is on disk when this returns.

        Raises:
            DiskError: it could not be written.
        """
        response_id = kept.response["id"]
        body = msgspec.json.encode(kept)
        sealed = self._database.encryption.seal(body, _name(tenant, response_id))
        now = int(time.time())

        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM responses WHERE expires <= ?", (now,))
            db.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?)",
                (response_id, tenant, now, now + max(1, int(ttl_s)), sealed),
            )
            db.execute(
                "DELETE FROM responses WHERE tenant = ? AND rowid NOT IN (SELECT rowid FROM "
                "responses WHERE tenant = ? ORDER BY created DESC, rowid DESC LIMIT ?)",
                (tenant, tenant, MAX_KEPT),
            )

        await self._database.run(work)

    async def get(self, tenant: str, response_id: str, *, param: str | None = None) -> KeptResponse:
        """One of the tenant's.

        Raises:
            ApiError: 404 where there is none.
        """

        def work(db: sqlite3.Connection) -> bytes | None:
            row = db.execute(
                "SELECT body FROM responses WHERE id = ? AND tenant = ? AND expires > ?",
                (response_id, tenant, int(time.time())),
            ).fetchone()
            return None if row is None else bytes(row["body"])

        sealed = await self._database.run(work)
        if sealed is None:
            raise _not_found(response_id, param)
        body = self._database.encryption.unseal(sealed, _name(tenant, response_id))
        return msgspec.json.decode(body, type=KeptResponse)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Forget one of the tenant's.

        Raises:
            ApiError: 404 where there is none.
        """

        def work(db: sqlite3.Connection) -> int:
            return db.execute(
                "DELETE FROM responses WHERE id = ? AND tenant = ?", (response_id, tenant)
            ).rowcount

        if not await self._database.run(work):
            raise _not_found(response_id, None)
        await self._database.erase()


def _name(tenant: str, response_id: str) -> str:
    return f"response {tenant}\0{response_id}"


def _not_found(response_id: str, param: str | None) -> ApiError:
    return ApiError(404, f"There is no response {response_id[:64]!r}.", param=param)
