"""Chunks of one request on their way to a reader who may be slow."""

from collections.abc import Iterator
from dataclasses import replace

from ridgeline.core.request import CompletionChunk


def merge_chunks(first: CompletionChunk, second: CompletionChunk) -> CompletionChunk:
    """One chunk that says what two consecutive ones of a sample said."""
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        prompt=first.prompt or second.prompt,
    )


class ChunkBuffer:
    """Holds a chunk per sample at the most; more of the same sample are merged into it.

    So what waits for a reader is bounded by the output itself. Samples come out in the order in
    which their text began to wait.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[CompletionChunk]] = {}  # by sample, merged when taken

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, chunk: CompletionChunk) -> None:
        self._waiting.setdefault(chunk.index, []).append(chunk)

    def take(self) -> CompletionChunk:
        """The next chunk, merged from all that waits of its sample."""
        index = next(iter(self._waiting))
        return _join(self._waiting.pop(index))

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
