"""The hub library's progress, turned into calls of a `Progress`."""

import io
from typing import Any

from tqdm.std import tqdm  # type: ignore[import-untyped]

from ridgeline.weights.progress import Progress


class ByteCount:
    """Bytes downloaded so far, of a total known beforehand; never goes back or over the total."""

    def __init__(self, total_bytes: int, label: str, progress: Progress | None) -> None:
        self.done_bytes = 0
        self._total_bytes = total_bytes
        self._label = label
        self._progress = progress
        self._kept_bytes = 0

    def start_attempt(self) -> int:
        """Count from here on; returns the bytes done."""
        self._kept_bytes = self.done_bytes
        return self.done_bytes

    def set_attempt_bytes(self, num_bytes: int) -> None:
        """The bytes that this attempt has downloaded."""
        done = min(self._kept_bytes + num_bytes, self._total_bytes)
        if done > self.done_bytes:
            self.done_bytes = done
            self._report()

    def finish(self) -> None:
        """All is there."""
        self.set_attempt_bytes(self._total_bytes)

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self.done_bytes, self._total_bytes, self._label)


def bar_class(count: ByteCount) -> type[Any]:
    """A bar class for ``snapshot_download`` that draws nothing and feeds ``count``."""

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            # A disabled bar does not count, so this one draws into nothing.
            kwargs |= {"disable": False, "file": io.StringIO(), "mininterval": 0.0, "miniters": 0}
            super().__init__(*args, **kwargs)

        def display(self, *_: Any, **__: Any) -> None:
            # One bar counts files, and another the bytes on the wire.
            if self.unit == "B" and self.desc != "Downloading bytes":
                count.set_attempt_bytes(int(self.n))

    return Bar
