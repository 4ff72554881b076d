"""Responses that are kept so that later ones go on from them: each key's own, for a time."""

import asyncio
import logging
import sqlite3
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from ridgeline.core.errors import DiskError
from ridgeline.server.errors import ApiError
from ridgeline.server.jobs.database import Database

MAX_KEPT = 10_000  # of one tenant; the oldest go first
MAX_TENANT_BYTES = 256 << 20
MAX_BYTES = 1 << 30  # of all tenants; beyond them the oldest of whoever has most
PURGE_EVERY_S = 60.0

_log = logging.getLogger(__name__)
_TOTALS = (
    "CREATE TEMP TABLE totals (tenant TEXT PRIMARY KEY, count INTEGER, bytes INTEGER)",
    "INSERT INTO totals SELECT tenant, COUNT(*), SUM(LENGTH(body)) FROM responses GROUP BY tenant",
    """CREATE TEMP TRIGGER kept AFTER INSERT ON main.responses BEGIN
        INSERT INTO totals VALUES (NEW.tenant, 1, LENGTH(NEW.body)) ON CONFLICT (tenant)
        DO UPDATE SET count = count + 1, bytes = bytes + excluded.bytes;
    END""",
    """CREATE TEMP TRIGGER deleted AFTER DELETE ON main.responses BEGIN
        UPDATE totals SET count = count - 1, bytes = bytes - LENGTH(OLD.body)
        WHERE tenant = OLD.tenant;
    END""",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """``response`` is what was answered; ``items`` all of the conversation, its output included."""

    response: dict[str, Any]
    items: list[dict[str, Any]]


class ResponseStore:
    """Reads and writes them. Nobody finds those of another tenant, nor any after their time.

    Raises:
        DiskError: the database is damaged.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._has_deleted = False  # what is still in the log of changes
        database.run_blocking(_count)

    async def put(self, tenant: str, kept: KeptResponse, *, ttl_s: float) -> None:
        """Keep a response; it is on disk when this returns. Older ones make room for it.

        Raises:
            ApiError: 413 where it alone is more than a tenant may have.
            DiskError: it could not be written.
        """
        response_id = kept.response["id"]
        body = msgspec.json.encode(kept)
        sealed = self._database.encryption.seal(body, _name(tenant, response_id))
        if len(sealed) > MAX_TENANT_BYTES:
            raise ApiError(
                413,
                f"The conversation takes {len(sealed):,} bytes, and {MAX_TENANT_BYTES:,} are "
                "kept; send store: false, and the conversation as input.",
            )

        def work(db: sqlite3.Connection) -> int:
            now = int(time.time())
            db.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?)",
                (response_id, tenant, now, now + max(1, int(ttl_s)), sealed),
            )
            return _make_room(db, tenant)

        self._has_deleted |= await self._database.run(work) > 0

    async def purge(self) -> None:
        """Erase from the disk what has expired, and what made room for others.

        Raises:
            DiskError: the database could not be written.
        """

        def work(db: sqlite3.Connection) -> int:
            query = "DELETE FROM responses WHERE expires <= ?"
            return db.execute(query, (int(time.time()),)).rowcount

        self._has_deleted |= await self._database.run(work) > 0
        if self._has_deleted:
            await self._database.erase()
            self._has_deleted = False

    async def keep_purging(self) -> None:
        """Purge at once, and then every minute until cancelled."""
        while True:
            try:
                await self.purge()
            except DiskError as error:
                _log.error("Expired responses stay for now: %s", error)
            await asyncio.sleep(PURGE_EVERY_S)

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


def _count(db: sqlite3.Connection) -> None:
    """Keep the number and the bytes of each tenant's at hand; triggers see every change."""
    for statement in _TOTALS:
        db.execute(statement)


def _make_room(db: sqlite3.Connection, tenant: str) -> int:
    """Delete the oldest that are too many, now that a tenant has one more; how many."""
    num_deleted = 0
    while (whose := _over_limit(db, tenant)) is not None:
        deleted = db.execute(
            "DELETE FROM responses WHERE rowid = (SELECT rowid FROM responses WHERE tenant = ? "
            "ORDER BY created, rowid LIMIT 1)",
            (whose,),
        ).rowcount
        assert deleted, "the totals are those of the rows"
        num_deleted += deleted
    return num_deleted


def _over_limit(db: sqlite3.Connection, tenant: str) -> str | None:
    """Whose oldest response must go, if one must."""
    count, size = db.execute(
        "SELECT count, bytes FROM totals WHERE tenant = ?", (tenant,)
    ).fetchone()
    if count > MAX_KEPT or size > MAX_TENANT_BYTES:
        return tenant
    (total,) = db.execute("SELECT SUM(bytes) FROM totals").fetchone()
    if total <= MAX_BYTES:
        return None
    query = "SELECT tenant FROM totals ORDER BY bytes DESC LIMIT 1"
    return str(db.execute(query).fetchone()["tenant"])


def _name(tenant: str, response_id: str) -> str:
    return f"response {tenant}\0{response_id}"


def _not_found(response_id: str, param: str | None) -> ApiError:
    return ApiError(
        404,
        f"There is no response {response_id[:64]!r}: --keep-responses-s says for how long they are "
        "kept, by default not at all.",
        param=param,
    )
