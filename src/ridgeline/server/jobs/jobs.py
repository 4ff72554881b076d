"""Everything of files and batches that a server holds."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.server.jobs.batches import BatchStore
from ridgeline.server.jobs.database import Database
from ridgeline.server.jobs.files import FileStore
from ridgeline.server.jobs.worker import BatchWorker

if TYPE_CHECKING:
    from ridgeline.server.context import Server


class Jobs:
    """The stores and the worker over one data folder."""

    def __init__(self, server: "Server", folder: Path) -> None:
        self._database = Database(folder)
        self.files = FileStore(self._database)
        self.batches = BatchStore(self._database, self.files)
        self.worker = BatchWorker(server, self.batches, self.files)

    def close(self) -> None:
        """Release the folder; what is unfinished goes on at the next start."""
        self._database.close()


def default_folder() -> Path:
    """Where data lies without ``--data-dir``."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "ridgeline"
