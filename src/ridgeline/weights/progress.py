"""How long work reports how far it is; drawing it is up to the caller."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with the bytes done, the bytes in all, and what is being worked on."""


class ByteCount:
    """Adds up the bytes of many tensors and reports them."""

    def __init__(self, progress: Progress | None, total_bytes: int) -> None:
        self._progress, self._total_bytes = progress, total_bytes
        self._done_bytes = 0

    def of(self, label: str) -> Callable[[int], None]:
        """What a reader of the tensor ``label`` calls with the bytes that it has read."""

        def advance(num_bytes: int) -> None:
            self._done_bytes += num_bytes
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes, label)

        return advance
