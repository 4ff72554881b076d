"""`EngineClient`: what a server asks of an engine, wherever that runs."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ridgeline.core.config import ResolvedConfig
from ridgeline.core.request import CompletionChunk, GenerateRequest
from ridgeline.core.spec import ModelSpec
from ridgeline.engine.info import EngineInfo, LoadSummary
from ridgeline.engine.stats import EngineStats, Health
from ridgeline.kvcache import MissReport
from ridgeline.text import ChatTemplate, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The embedding of a text, float32 ``[width]``, or the scores ``[labels]`` of a pair."""

    vector: npt.NDArray[np.float32]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPrefix:
    """A prefix of ``num_tokens`` (whole blocks) whose KV stays, and for whose requests."""

    number: int
    num_tokens: int
    tenant: str
    adapter: str | None
    cache_salt: str


class Monitored(Protocol):
    """What is asked of one engine or of several as if they were one."""

    def health(self) -> Health:
        """Whether requests are taken now; follows the progress of steps."""
        ...

    def stats(self) -> EngineStats:
        """Counters, at most a fraction of a second old, and the latest executed steps."""
        ...

    async def delete_tenant(self, tenant: str) -> None:
        """Forget all KV that was computed for a tenant's requests, in memory and on disk.

        An engine that is just starting again does it before it computes anything.
        """
        ...

    @property
    def num_open_requests(self) -> int:
        """Requests that were begun and have not ended."""
        ...


class EngineClient(Monitored, Protocol):
    """An engine as its callers see it; every method is called in one event loop."""

    @property
    def info(self) -> EngineInfo:
        """The loaded model, and what runs it.

        Raises:
            EngineUnavailableError: the model is not loaded yet.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[CompletionChunk]:
        """Complete a prompt, chunk by chunk: an async generator.

        Closing it, or cancelling the task that reads it, aborts the request. The first chunk has a
        `PromptReport`, the last one the `RequestTimings`; the chunks of the n samples come mixed,
        told apart by ``index``.

        Raises (when it is first read, unless said otherwise):
            InvalidRequestError, ContextLengthError: the request is not possible.
            EngineUnavailableError: the engine takes no requests now; also later, when the engine
                dies before the first token and cannot be started again.
            EngineError: the engine died after some output, and the rest cannot be made.
        """
        ...

    async def embed(
        self,
        prompt: str | tuple[int, ...],
        *,
        request_id: str,
        adapter: str | None = None,
        cache_salt: str = "",
        tenant: str = "",
        priority: int = 0,
        second_start: int | None = None,
    ) -> Embedding:
        """What the model makes of a prompt's hidden states: an embedding, or a classifier's scores.

        ``second_start`` is where the second text of a pair begins. Raises what `generate` raises,
        OverloadedError when a full queue gave its place to another, and EngineUnavailableError
        when it is aborted. Cancelling it aborts the request.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request in any state; its reader gets ``finish_reason`` abort.

        Nothing happens if there is no such request (any more).
        """
        ...

    async def pin_prefix(
        self,
        token_ids: tuple[int, ...],
        *,
        request_id: str,
        adapter: str | None = None,
        cache_salt: str = "",
        tenant: str = "",
        priority: int = 0,
    ) -> PinnedPrefix:
        """Compute a prefix, and keep the KV of its whole blocks until it is unpinned.

        Only requests of the same adapter and ``cache_salt`` gain by it. An engine that starts again
        has none, and neither has a tenant that was deleted.

        Raises what `generate` raises, and:
            InvalidRequestError: there is no prefix cache, or less than a block to keep.
            OutOfMemoryError: what is left of the KV pool would not hold a sequence of full length.
            OverloadedError: it was evicted before it could be kept, each time that it was tried.
        """
        ...

    def unpin_prefix(self, number: int) -> None:
        """Let go of a pinned prefix.

        Raises:
            InvalidRequestError: no prefix of that number is pinned.
        """
        ...

    async def explain_miss(
        self, token_ids: tuple[int, ...], *, adapter: str | None = None, cache_salt: str = ""
    ) -> MissReport:
        """How far a prompt is cached, and the first token that differs from what is.

        Compared with prompts of the same adapter and ``cache_salt`` alone. Raises what `pin_prefix`
        raises.
        """
        ...

    async def profile(self, num_steps: int, *, timeout_s: float, by_layer: bool = False) -> bytes:
        """Where the seconds of the next steps go, as JSON (`roofline.profile.Profile.to_json`); of
        fewer steps if not so many run within ``timeout_s``.

        Raises:
            InvalidRequestError: steps are being recorded already, none ran, or the executor runs no
                ops.
            EngineUnavailableError: the engine takes no requests now, or died meanwhile.
        """
        ...

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let those in progress end for ``drain_s`` seconds, then stop.

        What is left then is aborted. The engine cannot be started again.
        """
        ...

    @property
    def pinned_prefixes(self) -> tuple[PinnedPrefix, ...]:
        """Those of `pin_prefix` that were not let go of."""
        ...

    @property
    def model_name(self) -> str:
        return self.info.name

    @property
    def spec(self) -> ModelSpec:
        return self.info.spec

    @property
    def config(self) -> ResolvedConfig:
        return self.info.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.info.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.info.chat_template

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The sampling settings that the model recommends."""
        return self.info.sampling_defaults

    @property
    def summary(self) -> LoadSummary:
        """What was loaded, in a line and in figures."""
        return self.info.summary

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.info.eos_token_ids

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that a request can choose."""
        return self.info.adapters
