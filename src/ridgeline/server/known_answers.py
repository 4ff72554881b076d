"""Outputs that need not be made: they would come out the same, or answer the same question."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ridgeline.core.request import CompletionChunk, FinishReason, PromptReport
from ridgeline.engine.stream_buffer import ChunkBuffer
from ridgeline.server.context import Call
from ridgeline.server.response_cache import CacheHit, ReplayedChunk, ResponseCache
from ridgeline.server.semantic.answers import SimilarAnswers, UserQuestion
from ridgeline.server.semantic.cache import Scope

Piece = tuple[int, CompletionChunk]
OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)
_plain = partial(msgspec.structs.replace, request_id=0, timings=None)


def repeated(
    call: Call,
    responses: ResponseCache,
    key: bytes,
    source: AsyncGenerator[Piece, None],
    *,
    num_samples: int,
    first: int,
) -> AsyncGenerator[Piece, None]:
    """The outputs of a prompt as they came out before, or those of ``source``, which are kept.

    ``first`` is the index of the first of them.
    """
    hit = responses.get(call.caller.tenant, key)
    call.cache_hits.append(None if hit is None else hit.id)
    if hit is not None:
        return _replayed(hit, first)
    keep = partial(responses.put, call.caller.tenant, key)
    return _recorded(source, num_samples, keep)


async def _replayed(hit: CacheHit, first: int) -> AsyncGenerator[Piece, None]:
    for chunk in hit.chunks:
        yield first + chunk.index, chunk


async def _recorded(
    source: AsyncGenerator[Piece, None],
    num_samples: int,
    keep: Callable[[list[CompletionChunk]], None],
) -> AsyncGenerator[Piece, None]:
    """Outputs, of which ``keep`` is told once all of them have come to their own end."""
    buffer, num_whole = ChunkBuffer(), 0
    async with contextlib.aclosing(source):
        async for index, chunk in source:
            buffer.put(chunk)
            num_whole += chunk.finish_reason in OWN_ENDS
            yield index, chunk
    if num_whole == num_samples:
        chunks = [_plain(chunk) for chunk in buffer.drain()]
        keep(sorted(chunks, key=lambda chunk: (chunk.prompt is None, chunk.index)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question on its way: ``scope`` is all that its answer depends on beside it.

    ``anew`` makes a whole answer to it in the time that others leave; ``None`` if that does not
    come to its end.
    """

    question: UserQuestion
    scope: Scope
    num_prompt_tokens: int
    cache_salt: str
    priority: int
    anew: Callable[[], Coroutine[Any, Any, str | None]]


async def similar(
    call: Call, answers: SimilarAnswers, asked: Asked, source: AsyncGenerator[Piece, None]
) -> AsyncGenerator[Piece, None]:
    """The answer to a question like this one, or that of ``source``, from which is learnt."""
    question, scope = asked.question, asked.scope
    found = await answers.nearest(
        scope, question, cache_salt=asked.cache_salt, priority=asked.priority
    )
    call.cache_hits[:] = [found.label if found is not None and found.is_hit else None]
    if found is not None and found.entry is not None and found.is_hit:
        await source.aclose()
        report = PromptReport(num_tokens=asked.num_prompt_tokens, num_cached_tokens=0)
        fields = msgspec.structs.asdict(found.entry.answer) | {"prompt": report}
        yield 0, ReplayedChunk(**fields)
        if answers.cache.wants_audit():
            answers.audit(question, found, asked.anew())
        return

    def keep(chunks: list[CompletionChunk]) -> None:
        if found is not None:
            answers.learn(scope, question, found, msgspec.structs.replace(chunks[0], prompt=None))

    async with contextlib.aclosing(_recorded(source, 1, keep)) as pieces:
        async for piece in pieces:
            yield piece
