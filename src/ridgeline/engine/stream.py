"""A request whose text is taken chunk by chunk."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

from ridgeline.core.errors import NoTokenError
from ridgeline.core.request import CompletionChunk, FinishReason, RequestOutput
from ridgeline.engine.request_state import RequestState


class CompletionStream(Iterator[CompletionChunk]):
    """Iterate for the chunks; `output` has everything so far, `close` aborts what is left.

    Raises NoTokenError where an output ends without a token; others of the request go on.

    ``step`` runs one engine step, which calls `put` for this request's chunks; ``abort`` ends the
    request now, and ``abort_later`` before the next step. Dropping the stream does the latter.
    """

    def __init__(
        self,
        state: RequestState,
        step: Callable[[], None],
        *,
        abort: Callable[[], None],
        abort_later: Callable[[], None],
    ) -> None:
        self._state = state
        self._step = step
        self._abort = abort
        self._abort_later = abort_later
        self._chunks: deque[CompletionChunk] = deque()
        self._closing = False

    def put(self, chunk: CompletionChunk) -> None:
        self._chunks.append(chunk)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> CompletionChunk:
        while not self._chunks:
            if self._closing:
                self.close()
            if self._state.is_finished:
                raise StopIteration
            self._step()
        chunk = self._chunks.popleft()
        if chunk.finish_reason is FinishReason.ERROR:
            raise NoTokenError
        return chunk

    def output(self) -> RequestOutput:
        """The outcome so far, timings included once it is finished or closed."""
        return self._state.output()

    def close(self) -> None:
        """Abort the request if it still runs; nothing more is yielded."""
        self._abort()
        self._chunks.clear()

    def request_close(self) -> None:
        """Close between this step and the next; may be called from a signal handler."""
        self._closing = True

    def __del__(self) -> None:
        self._abort_later()  # the garbage collector may have come in the middle of a step
