"""Which entries are being written, for those who would rather wait for one than compute it."""

import threading
import time
from collections.abc import Iterable


class ComingEntries:
    """Keys of entries that are on their way into the tiers; every method from any thread."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._changed = threading.Condition()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        """An entry will be written."""
        self._keys.add(key)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Entries are there, or will not be written after all."""
        with self._changed:
            self._keys.difference_update(keys)
            self._changed.notify_all()

    def wait(self, key: bytes, until_s: float) -> None:
        """Until an entry is not on its way any more, or until a time of `time.monotonic`."""
        with self._changed:
            self._changed.wait_for(
                lambda: key not in self._keys, max(0.0, until_s - time.monotonic())
            )
