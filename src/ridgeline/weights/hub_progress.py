"""The hub library's progress, turned into calls of a `Progress`."""

import threading
from collections.abc import Iterator
from typing import Any, Self

from ridgeline.weights.progress import Progress


class DownloadCount:
    """Bytes downloaded so far, of a total known beforehand; never goes back or over the total.

    ``failure`` is what ``progress`` raised, if it did: the caller's error, not the download's.
    """

    def __init__(self, total_bytes: int, label: str, progress: Progress | None) -> None:
        self.done_bytes = 0
        self.failure: Exception | None = None
        self._total_bytes = total_bytes
        self._label = label
        self._progress = progress
        self._kept_bytes = 0
        self._lock = threading.RLock()

    def start_attempt(self) -> int:
        """Count from here on; returns the bytes done."""
        self._kept_bytes = self.done_bytes
        return self.done_bytes

    def set_attempt_bytes(self, num_bytes: int) -> None:
        """The bytes that this attempt has downloaded."""
        with self._lock:
            done = min(self._kept_bytes + num_bytes, self._total_bytes)
            if done > self.done_bytes:
                self.done_bytes = done
                self._report()

    def finish(self) -> None:
        """All is there."""
        self.set_attempt_bytes(self._total_bytes)

    def _report(self) -> None:
        if self._progress is None:
            return
        try:
            self._progress(self.done_bytes, self._total_bytes, self._label)
        except Exception as error:
            self.failure = error
            raise


def bar_class(count: DownloadCount) -> type[Any]:
    """A bar for ``snapshot_download`` that draws nothing and feeds ``count``.

    It has what the library uses of ``tqdm``, and is none: tqdm keeps its lock for ever when drawing
    fails, which would hang the next download.
    """

    class Bar:
        _lock: Any = threading.RLock()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._items = args[0] if args else ()
            # One bar counts files, and another the bytes on the wire.
            self._counts = kwargs.get("unit") == "B" and kwargs.get("desc") != "Downloading bytes"
            self.total = kwargs.get("total")
            self.n = 0
            self.format_dict: dict[str, Any] = {}

        @classmethod
        def get_lock(cls) -> Any:
            return cls._lock

        @classmethod
        def set_lock(cls, lock: Any) -> None:
            cls._lock = lock

        def update(self, num: float | None = 1) -> None:
            with self._lock:
                self.n += int(num or 0)
                if self._counts:
                    count.set_attempt_bytes(self.n)

        def __iter__(self) -> Iterator[Any]:
            yield from self._items

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def _nothing(self, *_: Any, **__: Any) -> None:
            pass

        refresh = close = set_description = set_description_str = set_postfix_str = _nothing

    return Bar
