"""llama.cpp's own interface: ``/completion``, ``/infill``, ``/apply-template``."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ridgeline.core.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_TOKENS
from ridgeline.server.schemas.chat import ChatMessage
from ridgeline.server.schemas.generation import Name, Penalty, Share, StopString

Off = Annotated[float, Meta(ge=0.0, le=0.0)]
One = Annotated[float, Meta(ge=1.0, le=1.0)]


class LlamaCppOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """``n_predict``: −1 is up to the end of the context. ``grammar``: GBNF or Lark.

    What would change the draw and is not here may only be off: ``typical_p``, ``mirostat``,
    ``dry_multiplier``, ``xtc_probability``, ``dynatemp_range``, ``top_n_sigma``. Inert:
    ``n_keep``, ``id_slot``, ``cache_prompt`` (prefixes are always cached), ``repeat_last_n`` (all
    of the text counts), ``samplers`` and ``min_keep`` (the order is ours), ``timings_per_token``,
    ``post_sampling_probs``, and the parameters of what is off.
    """

    model: Name | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Share | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] = -1
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    n_probs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0
    return_tokens: bool = False
    typical_p: One | None = None
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: Off | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: Off | None = None
    xtc_threshold: float | None = None
    dynatemp_range: Off | None = None
    dynatemp_exponent: float | None = None
    top_n_sigma: Annotated[float, Meta(le=0.0)] | None = None
    n_keep: int | None = None
    n_discard: int | None = None
    id_slot: int | None = None
    cache_prompt: bool | None = None
    repeat_last_n: int | None = None
    samplers: list[str] | None = None
    min_keep: int | None = None
    timings_per_token: bool | None = None
    post_sampling_probs: bool | None = None
    t_max_predict_ms: None = None


class LlamaCppRequest(LlamaCppOptions, kw_only=True):
    """``prompt``: a text, or token ids."""

    prompt: Annotated[str | list[Any], Meta(description="text, or token ids")]


class InfillRequest(LlamaCppOptions, kw_only=True):
    """What stands before and after the gap; ``prompt`` goes on with ``input_prefix``.

    ``input_extra``: other files, each with ``filename`` and ``text``, put before the prefix as the
    name on a line of its own, the text and an empty line.
    """

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    input_extra: list[dict[str, str]] | None = None


class ApplyTemplateRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A conversation to render."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    model: Name | None = None
