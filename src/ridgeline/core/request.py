"""Requests as the engine sees them, and what it gives back."""

import time
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from ridgeline.core.kv_reuse import ReusedRange
from ridgeline.core.pooling import Pooling
from ridgeline.core.result import TokenLogprobs
from ridgeline.core.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why an output ended: by itself, at a limit, unwanted, or because no token was possible.

    ``SHED``: a full queue gave its place to another, before anything was computed of it.
    ``CONTENT_FILTER``: a guard (`ridgeline.engine.guard`) let no more of it out.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    SHED = "shed"
    CONTENT_FILTER = "content_filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and what is wanted of it.

    ``cache_key`` names all that the KV of a prefix depends on beside its tokens (see
    `ridgeline.kvcache`); ``None`` keeps the request out of the prefix cache. Requests of one
    ``draft_namespace`` may serve each other's drafts (see `ridgeline.core.protocols.Drafter`).
    ``wants_logits`` asks for the prompt's logits and ``pooling`` for one vector of its final hidden
    states, instead of output; ``second_start`` see `Admission`. Queue policies go by ``tenant``,
    ``priority`` (lower runs first) and ``deadline_s``, by when the last token is due.
    ``deadline_s`` and ``arrival_s`` are on the ``time.monotonic`` clock.

    ``output_token_ids`` are the first tokens of its output, made by an engine before this one: the
    request has one sample, number ``first_sample`` of what was asked, and goes on as if it had made
    them itself. ``params`` count them (``max_tokens``, penalties, the grammar).

    ``expected_token_ids`` are drafts: an output that the caller expects in whole or in part.

    ``reused`` is what the prompt takes of documents, which needs a ``cache_key``; ``is_document``:
    it is such a document, and nothing but its KV is wanted.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    output_token_ids: tuple[int, ...] = ()
    first_sample: int = 0
    expected_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    adapter: int = 0
    wants_logits: bool = False
    pooling: Pooling | None = None
    second_start: int | None = None
    cache_key: bytes | None = None
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    draft_namespace: str | None = None
    reused: tuple[ReusedRange, ...] = ()
    is_document: bool = False
    arrival_s: float = field(default_factory=time.monotonic)

    @property
    def generates(self) -> bool:
        """Whether output tokens are wanted."""
        return not (self.wants_logits or self.pooling or self.is_document)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What a caller of the engine asks for; the engine makes a `Request` of it.

    ``request_id`` is the caller's own, unique among the requests in progress. ``prompt`` is text or
    token ids; ``adapter`` the name of a LoRA adapter. Only requests of one ``cache_salt`` reuse
    each other's prefixes. A lower ``priority`` runs first. ``deadline_s`` and ``arrival_s`` are on
    the ``time.monotonic`` clock. ``seed`` is that of ``params`` without one. ``output_token_ids``,
    ``first_sample`` and ``expected_token_ids`` are as in `Request`; chunks have what comes after.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    params: SamplingParams
    seed: int | None = None
    output_token_ids: tuple[int, ...] = ()
    first_sample: int = 0
    expected_token_ids: tuple[int, ...] = ()
    adapter: str | None = None
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    arrival_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """Seconds since the request arrived.

    ``queue_s``: to the first step that computed something. ``ttft_s``: to the first token of any
    sample. ``tpot_s``: (end to end − TTFT) / (n − 1) of the longest sample, n its tokens; ``None``
    for n < 2. ``end_to_end_s``: to the last token of the last sample.
    """

    queue_s: float
    ttft_s: float | None
    tpot_s: float | None
    end_to_end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the n samples of a request.

    Of tokens that another engine made (`Request`) there is no log-probability.

    ``num_drafted[i]`` drafts had tokens at position i (of a tree, at that depth), and of
    ``num_accepted[i]`` one was accepted; ``num_accepted_by_rank[r]`` of them were the r-th in their
    place.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    num_drafted: tuple[int, ...] = ()
    num_accepted: tuple[int, ...] = ()
    num_accepted_by_rank: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """What is known of a prompt once it is computed.

    ``logprobs[i]`` is for prompt token i (``None`` for the first), where they were asked for.
    """

    num_tokens: int
    num_cached_tokens: int
    logprobs: tuple[TokenLogprobs | None, ...] | None = None


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a step added to one sample: the unit of streaming.

    ``text`` may be empty while a character or a possible stop string is held back, and may belong
    to earlier tokens than ``token_ids``. The last chunk of a sample has a ``finish_reason``. The
    first chunk of a request has its ``prompt`` report, the last one its ``timings``. The last of a
    sample has how many tokens of drafts were verified, and accepted. A guard takes
    back the characters ``retracted`` (half-open) of a sample's text that went out before.
    """

    request_id: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt: PromptReport | None = None
    timings: RequestTimings | None = None
    retracted: tuple[int, int] | None = None
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The whole outcome of a request, or what there is of it so far."""

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    timings: RequestTimings | None = None
