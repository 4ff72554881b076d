"""Chunks of one request on their way to a reader who may be slow."""

from collections.abc import Iterator

from msgspec.structs import replace

from ridgeline.core.request import CompletionChunk

_MAX_PARTS = 256  # merged at once, so that a long wait costs little memory


class ChunkBuffer:
    """Gives out what waits of a sample as one chunk, however many it came in.

    So what waits for a reader is bounded by the output itself; ``num_logprobs`` counts the entries
    of its largest part. Samples come out in the order in which their text began to wait.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[CompletionChunk]] = {}  # by sample
        self.num_logprobs = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, chunk: CompletionChunk) -> None:
        waiting = self._waiting.setdefault(chunk.index, [])
        waiting.append(chunk)
        self.num_logprobs += sum(1 + len(entry.top) for entry in chunk.logprobs)
        if len(waiting) >= _MAX_PARTS:
            waiting[:] = [_join(waiting)]

    def take(self) -> CompletionChunk:
        """The next chunk, merged from all that waits of its sample."""
        index = next(iter(self._waiting))
        chunk = _join(self._waiting.pop(index))
        self.num_logprobs -= sum(1 + len(entry.top) for entry in chunk.logprobs)
        return chunk

    def drain(self) -> Iterator[CompletionChunk]:
        while self._waiting:
            yield self.take()


def _join(chunks: list[CompletionChunk]) -> CompletionChunk:
    """Merge a run of chunks in one pass, so that a long wait costs linear time."""
    if len(chunks) == 1:
        return chunks[0]
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        prompt=chunks[0].prompt,
    )
