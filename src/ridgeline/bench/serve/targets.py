"""What load is put on: an `AsyncEngine`, or a server behind a URL."""

import itertools
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from ridgeline.core.errors import NetworkError
from ridgeline.core.request import GenerateRequest
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.engine.client import EngineClient

THROTTLED = (429, 503)


class StatusError(NetworkError):
    """A server refused a request with an HTTP status."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some output tokens as they came; the other fields where the target tells them.

    ``token_ids`` are empty where only their number is known. ``is_shown``: there is text among it
    that a user sees; reasoning and calls of tools are none.
    """

    num_tokens: int
    is_shown: bool = False
    token_ids: tuple[int, ...] = ()
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    queue_s: float | None = None


class Target(Protocol):
    """Completes prompts of token ids with exactly ``max_tokens`` tokens, greedily."""

    def stream(
        self, token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[Piece, None]: ...


class EngineTarget:
    """An engine in a process, or in a thread, of this machine."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    async def stream(
        self, token_ids: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[Piece, None]:
        request = GenerateRequest(
            request_id=str(next(self._numbers)),
            prompt=token_ids,
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        )
        async for chunk in self._engine.generate(request):
            yield Piece(
                num_tokens=len(chunk.token_ids),
                is_shown=bool(chunk.text),
                token_ids=chunk.token_ids,
                num_cached_tokens=chunk.prompt.num_cached_tokens if chunk.prompt else None,
                queue_s=chunk.timings.queue_s if chunk.timings else None,
            )
