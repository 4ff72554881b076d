"""Fields that every route which generates text shares, with the bounds that all of them have."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ridgeline.core.kv_reuse import MAX_SEGMENTS
from ridgeline.core.sampling_params import (
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS,
)
from ridgeline.core.structured_outputs import TextFormat
from ridgeline.server.schemas.samplers import LlamaCppSamplers

MAX_PRIORITY = 1_000_000
MAX_DEADLINE_MS = 86_400_000

Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Limit = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]  # −1 is none
Positive = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
ToolName = Annotated[
    str,
    Meta(
        pattern=r"^[a-zA-Z0-9_.-]{1,128}(?!\n)$",
        description="1 to 128 letters of a to z, digits, points, dashes and underscores",
    ),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]


class StructuredOutputsBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """One of these decides what the output looks like."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    format: TextFormat | None = None
    json_object: bool | None = None


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """``continuous_usage_stats``: usage in every chunk, not only in the last.

    ``include_obfuscation`` is inert: there is none.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class NamedContent(Struct, forbid_unknown_fields=True, kw_only=True):
    """``cached_content`` where Gemini's clients have it."""

    cached_content: Name | None = None


class ExtraBody(NamedContent, kw_only=True):
    """What clients send in a field of its own rather than beside the others."""

    google: NamedContent | None = None


class KVCompressionBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """See `ridgeline.core.kv_compression.KVCompression`."""

    method: Literal["streaming_llm", "snapkv"] = "streaming_llm"
    window: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    sinks: Count | None = None
    budget: Annotated[int, Meta(ge=2, le=MAX_TOKENS)] | None = None


class Generation(LlamaCppSamplers, kw_only=True):
    """How tokens are chosen and when the output ends; ``None`` is the model's default.

    ``seed``: −1 draws one; other negative ones count modulo 2⁶⁴. ``cached_content``: the prefix
    (``/v1/caches``) that the prompt goes on from.
    """

    model: Name | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: int | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    guided_grammar: str | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    deadline_ms: Annotated[float, Meta(gt=0.0, le=MAX_DEADLINE_MS)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    cached_content: Name | None = None
    extra_body: ExtraBody | None = None
    kv_compression: KVCompressionBody | None = None
    segments: Annotated[list[str | list[Count]], Meta(max_length=MAX_SEGMENTS)] | None = None
    segment_reuse: Count | Literal["all"] | None = None
    stream: bool | None = None


class PredictedPart(Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a predicted output."""

    type: Literal["text"]
    text: str


class PredictedOutput(Struct, forbid_unknown_fields=True, kw_only=True):
    """What the output will be like, for OpenAI's predicted outputs."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        """All of it."""
        parts = self.content
        return parts if isinstance(parts, str) else "".join(each.text for each in parts)


class OpenAIGeneration(Generation, kw_only=True):
    """What completions and chat share beyond that.

    ``use_beam_search``: the outputs are the ``n`` best beams. ``prediction`` is a draft of the
    output, for engines that look for drafts; it changes no output.

    Inert, because SDKs send them: ``user``, ``metadata``, ``store``, ``service_tier``,
    ``safety_identifier``, ``prompt_cache_key``, ``prompt_cache_options``,
    ``prompt_cache_retention``; because clients of peers do: ``request_id``,
    ``guided_decoding_backend``, ``spaces_between_special_tokens`` (vLLM), ``keep_alive``
    (Ollama), ``ttl`` (LM Studio). ``repeat_penalty`` and ``n_predict`` are llama.cpp's words for
    ``repetition_penalty`` and ``max_tokens``, which −1 leaves without a limit.
    """

    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-10.0, le=10.0)] | None = None
    response_format: "ResponseFormat | None" = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    prediction: PredictedOutput | None = None
    request_id: str | None = None
    guided_decoding_backend: str | None = None
    spaces_between_special_tokens: bool | None = None
    keep_alive: str | float | None = None
    ttl: float | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    n_predict: Limit | None = None


class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's wrapping of a schema; ``strict`` makes no difference, schemas always hold."""

    name: Name
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """What the text of the answer is; ``schema`` without the wrapping is llama.cpp's way."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


class Retraction(Struct, kw_only=True, omit_defaults=True):
    """A guard takes back characters ``[start, stop)`` of an output, as the model wrote it.

    ``content`` is what stays of the answer's, where reasoning and calls are told apart from it.
    """

    start: int
    stop: int
    content: str | None = None


class PromptTokensDetails(Struct, kw_only=True):
    """``cached_tokens`` were found in the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct, kw_only=True, omit_defaults=True):
    """``reasoning_tokens`` came before the end of the reasoning; ``cached_tokens`` were made for
    an earlier request, and are not paid for again. With a ``prediction``, tokens that were drafted:
    ``accepted_prediction_tokens`` are in the output, or came in the step that ended it with a stop
    string; ``rejected_prediction_tokens`` are not.
    """

    reasoning_tokens: int | None = None
    cached_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Cost(Struct, kw_only=True):
    """In the currency of the price list; the parts sum to ``total``."""

    prefill: float
    cached: float
    decode: float
    total: float


class Usage(Struct, kw_only=True, omit_defaults=True):
    """Tokens of a request, and its cost where the server has a price."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    cost: Cost | None = None
