"""The open requests of an `AsyncEngine`, each with what waits for its reader."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace as replace_fields

from ridgeline.core.errors import RidgelineError
from ridgeline.core.request import CompletionChunk, FinishReason, Request
from ridgeline.engine.stream_buffer import ChunkBuffer

MAX_WAITING_LOGPROBS = 500_000


class RequestStream:
    """One request between the worker's events and its reader; lives in one event loop.

    ``cache_salt`` is what the request was built with.
    """

    def __init__(self, request: Request, *, cache_salt: str) -> None:
        self.request = request
        self.cache_salt = cache_salt
        self.has_output = False
        self._made: list[int] = []  # of a single sample, since the request was last sent
        self.is_finished = False
        self.num_retries = 0
        self.vector: npt.NDArray[np.float32] | None = None
        self._buffer = ChunkBuffer()
        self._open_samples = set(range(request.params.n))
        self._error: RidgelineError | None = None
        self._changed = asyncio.Event()

    def put(self, chunk: CompletionChunk) -> None:
        """Take a chunk; the last one has the request's timings."""
        if self.has_output and chunk.prompt is not None:  # it has gone on: that was said before
            chunk = replace_fields(chunk, prompt=None)
        self.has_output = True
        if self.can_go_on:
            self._made.extend(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._open_samples.discard(chunk.index)
        self._buffer.put(chunk)
        self.is_finished = self.is_finished or not self._open_samples
        self._changed.set()

    def put_vector(self, vector: npt.NDArray[np.float32]) -> None:
        self.vector = vector
        self.is_finished = True
        self._changed.set()

    @property
    def is_overfull(self) -> bool:
        """Whether more waits than a reader may leave; only log-probabilities get there."""
        return self._buffer.num_logprobs > MAX_WAITING_LOGPROBS

    @property
    def can_go_on(self) -> bool:
        """Whether another engine can make the rest of what there is: of one sample, it can."""
        return self.request.params.n == 1 and self.request.generates

    def go_on(self) -> None:
        """From now on the request is one for the rest of its output."""
        made = (*self.request.output_token_ids, *self._made)
        self._made.clear()
        self.request = replace(self.request, output_token_ids=made)

    def abort(self) -> None:
        """End every sample that is still open."""
        for index in sorted(self._open_samples):
            number = self.request.request_id
            self.put(
                CompletionChunk(
                    request_id=number,
                    index=index,
                    text="",
                    token_ids=(),
                    finish_reason=FinishReason.ABORT,
                )
            )

    def fail(self, error: RidgelineError) -> None:
        """Raise ``error`` to the reader, after what waits; nothing happens if it has ended."""
        if self.is_finished:
            return
        self._error = error
        self.is_finished = True
        self._changed.set()

    async def chunks(self) -> AsyncIterator[CompletionChunk]:
        """Until the request ends; raises what it failed with."""
        while True:
            while self._buffer:
                yield self._buffer.take()
            if self._error is not None:
                raise self._error
            if self.is_finished:
                return
            self._changed.clear()
            await self._changed.wait()
