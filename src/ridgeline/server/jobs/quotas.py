"""What one tenant may store, and have waiting."""

import sqlite3
import sys
from dataclasses import dataclass

from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import ApiError
from ridgeline.server.jobs.database import IS_OPEN

_RETRY_AFTER_S = 10.0
_HELD = f"""
SELECT (SELECT COALESCE(SUM(bytes), 0) FROM files WHERE tenant = ?1)
     + (SELECT COALESCE(SUM(result_bytes), 0) FROM batches WHERE tenant = ?1 AND {IS_OPEN})
"""
_OPEN = f"SELECT COUNT(*), COALESCE(SUM(total), 0) FROM batches WHERE tenant = ? AND {IS_OPEN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """``storage_bytes`` of files and of results that will be in files; ``batches`` that are not
    over, and their ``lines``."""

    storage_bytes: int = sys.maxsize
    batches: int = sys.maxsize
    lines: int = sys.maxsize

    @staticmethod
    def of(config: ServerConfig) -> "Quotas":
        """Those of a server."""
        return Quotas(
            storage_bytes=config.file_storage_mib << 20,
            batches=config.max_open_batches,
            lines=config.max_batch_lines,
        )

    def room_bytes(self, db: sqlite3.Connection, tenant: str) -> int:
        """How much more a tenant may store; below 0 if it has more than it may."""
        (held,) = db.execute(_HELD, (tenant,)).fetchone()
        return self.storage_bytes - int(held)

    def check_room(self, db: sqlite3.Connection, tenant: str, size: int) -> int:
        """That a tenant may store ``size`` bytes more, and how many it may; ApiError 413 if not."""
        if size > (room := self.room_bytes(db, tenant)):
            raise self.no_room(room, size)
        return room

    def no_room(self, room: int, size: int) -> ApiError:
        """For what takes more than there is ``room``, in bytes."""
        text = f"{self.held_text(room)}, and this takes {size / 2**20:.1f}"
        return ApiError(413, f"{text}: delete some, or send less.", code="file_storage_limit")

    def held_text(self, room: int) -> str:
        """The beginning of a sentence: what is stored where there is ``room`` for so many bytes."""
        limit = self.storage_bytes
        return f"Your files take {(limit - room) / 2**20:.1f} of {limit / 2**20:.1f} MiB"

    def check_open(self, db: sqlite3.Connection, tenant: str, lines: int) -> None:
        """That a tenant may queue another batch, of so many lines; ApiError 429 if not."""
        batches, waiting = db.execute(_OPEN, (tenant,)).fetchone()
        if batches < self.batches and waiting + lines <= self.lines:
            return
        text = (
            f"{batches:,} of {self.batches:,} batches of yours are not over, with {waiting:,} of "
            f"{self.lines:,} lines, and this one has {lines:,}: wait until some are over."
        )
        raise ApiError(429, text, code="batch_limit", retry_after_s=_RETRY_AFTER_S)
