"""What the bodies of all requests take of a router's memory: it cannot ask for keys before it reads
them, since it knows none."""

import contextlib
from collections.abc import Callable, Iterator

from ridgeline.server.errors import ApiError

SMALL_BYTES = 64 << 10  # of a body that is always taken
_RETRY_AFTER_S = 1.0


class BodyMemory:
    """Bodies over `SMALL_BYTES` are refused where all together would take over ``most_bytes``."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """What is to be told of each piece of a body, which is held until the block ends.

        That raises `ApiError` (503) where there is no room for the piece.
        """
        own_bytes = 0

        def hold(num_bytes: int) -> None:
            nonlocal own_bytes
            is_small = own_bytes + num_bytes <= SMALL_BYTES
            if not is_small and self._held_bytes + num_bytes > self._most_bytes:
                text = "The router has too many large requests at once."
                raise ApiError(503, text, code="overloaded", retry_after_s=_RETRY_AFTER_S)
            own_bytes += num_bytes
            self._held_bytes += num_bytes

        try:
            yield hold
        finally:
            self._held_bytes -= own_bytes
