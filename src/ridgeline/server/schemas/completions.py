"""``/v1/completions``."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from ridgeline.core.sampling_params import MAX_LOGPROBS
from ridgeline.server.schemas.generation import OpenAIGeneration, Retraction, Usage

MAX_PROMPTS = 2048


class CompletionRequest(OpenAIGeneration, kw_only=True):
    """``prompt``: a string, token ids, or a list of either."""

    prompt: Annotated[str | list[Any], Meta(description="string, token ids, or a list of either")]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class CompletionLogprobs(Struct, kw_only=True):
    """Lists of one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True, omit_defaults=True):
    """One completion, or what a chunk adds to it; the last may take back some of those before."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    retraction: Retraction | None = None


class CompletionResponse(Struct, kw_only=True, omit_defaults=True):
    """Also a chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
