"""Folders of a process under TMPDIR, which nothing outlives: sockets and keys lie there."""

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_PREFIX = "ridgeline-run-"


class PrivateFolder:
    """A folder of mode 0700 that is its maker's while a lock is held on it.

    The lock ends with the process, however that ends, and making one removes those of this user
    that nobody holds: what was killed leaves nothing beyond the next start.
    """

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        _remove_abandoned(Path(base))
        while True:  # another start takes it for abandoned before it is locked
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink:
                return
            os.close(self._lock)

    def remove(self) -> None:
        """Remove it with what is in it; again, it does nothing."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def _remove_abandoned(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # held, removed meanwhile, or another user's
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(lock)
                if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == stat.S_IRWXU:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
