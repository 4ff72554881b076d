"""What one tenant may store, and have waiting."""

import sqlite3
import sys
from dataclasses import dataclass

from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import ApiError
from ridgeline.server.jobs.database import IS_OPEN

_RETRY_AFTER_S = 10.0
MOST_FILES = 100_000  # results of batches come on top
_HELD = f"""
SELECT COALESCE((SELECT bytes FROM held WHERE tenant = ?1), 0)
     + (SELECT COALESCE(SUM(result_bytes), 0) FROM batches WHERE tenant = ?1 AND {IS_OPEN}),
     COALESCE((SELECT files FROM held WHERE tenant = ?1), 0)
"""
_OPEN = f"SELECT COUNT(*), COALESCE(SUM(total), 0) FROM batches WHERE tenant = ? AND {IS_OPEN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """``storage_bytes`` of ``files`` and of results that will be in files; ``batches`` that are
    not over, and their ``lines``."""

    storage_bytes: int = sys.maxsize
    files: int = sys.maxsize
    batches: int = sys.maxsize
    lines: int = sys.maxsize

    @staticmethod
    def of(config: ServerConfig) -> "Quotas":
        """Those of a server."""
        return Quotas(
            storage_bytes=config.file_storage_mib << 20,
            files=MOST_FILES,
            batches=config.max_open_batches,
            lines=config.max_batch_lines,
        )

    def room_bytes(self, db: sqlite3.Connection, tenant: str) -> int:
        """How much more a tenant may store; below 0 if it has more than it may."""
        return self.storage_bytes - _held(db, tenant)[0]

    def check_room(self, db: sqlite3.Connection, tenant: str, size: int) -> int:
        """That a tenant may store another file, of ``size`` bytes, and how many it may; ApiError
        413 if not."""
        held, files = _held(db, tenant)
        if files >= self.files:
            text = f"You have {files:,} files, and may have {self.files:,}: delete some."
            raise ApiError(413, text, code="file_storage_limit")
        if size > (room := self.storage_bytes - held):
            raise self.no_room(room, f"this takes {size / 2**20:.1f}")
        return room

    def no_room(self, room: int, reason: str) -> ApiError:
        """For what takes more than there is ``room``, in bytes."""
        text = f"{self.held_text(room)}, and {reason}: delete some, or send less."
        return ApiError(413, text, code="file_storage_limit")

    def held_text(self, room: int) -> str:
        """The beginning of a sentence: what is stored where there is ``room`` for so many bytes."""
        limit = self.storage_bytes
        return f"Your files take {(limit - room) / 2**20:.1f} of {limit / 2**20:.1f} MiB"

    def check_open(self, db: sqlite3.Connection, tenant: str, lines: int) -> None:
        """That a tenant may queue another batch, of so many lines; ApiError 429 if not, 413 if it
        never may."""
        if lines > self.lines:
            text = f"The batch has {lines:,} lines, and yours may have {self.lines:,} in all."
            raise ApiError(413, text, code="batch_limit")
        batches, waiting = db.execute(_OPEN, (tenant,)).fetchone()
        if batches < self.batches and waiting + lines <= self.lines:
            return
        text = (
            f"{batches:,} of {self.batches:,} batches of yours are not over, with {waiting:,} of "
            f"{self.lines:,} lines, and this one has {lines:,}: wait until some are over."
        )
        raise ApiError(429, text, code="batch_limit", retry_after_s=_RETRY_AFTER_S)


def _held(db: sqlite3.Connection, tenant: str) -> tuple[int, int]:
    """Bytes and files of a tenant."""
    held, files = db.execute(_HELD, (tenant,)).fetchone()
    return int(held), int(files)
