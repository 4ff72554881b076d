"""Ctrl-C between steps, not in the middle of the bookkeeping of one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class InterruptGate:
    """Holds Ctrl-C back within ``with gate:``, and raises it at the end of the block.

    It works while `installed`, which is done once for many blocks since it takes a while. Only
    Python's own handler is replaced, and only in the main thread, where signals arrive.
    """

    def __init__(self) -> None:
        self._is_closed = False
        self._came: tuple[int, FrameType | None] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        ):
            yield
            return
        signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self) -> None:
        self._is_closed = True

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_closed = False
        if self._came is not None:
            came, self._came = self._came, None
            signal.default_int_handler(*came)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_closed:
            self._came = number, frame
        else:
            signal.default_int_handler(number, frame)
