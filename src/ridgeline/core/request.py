"""Requests as the engine sees them, and what it gives back."""

import time
from dataclasses import dataclass, field
from enum import StrEnum

from ridgeline.core.result import TokenLogprobs
from ridgeline.core.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why an output ended: by itself, at a limit, unwanted, or because no token was possible."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and what is wanted of it.

    ``cache_key`` names all that the KV of a prefix depends on beside its tokens (see
    `ridgeline.kvcache`); ``None`` keeps the request out of the prefix cache. ``arrival_s`` is on
    the ``time.monotonic`` clock.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    adapter: int = 0
    wants_logits: bool = False
    cache_key: bytes | None = None
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
    """One of the n samples of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionChunk:
    """What a step added to one sample: the unit of streaming.

    ``text`` may be empty while a character or a possible stop string is held back, and may belong
    to earlier tokens than ``token_ids``. The last chunk of a sample has a ``finish_reason``.
    """

    request_id: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


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
