"""``/v1/responses``, without state on the server."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from ridgeline.core.sampling_params import MAX_LOGPROBS
from ridgeline.server.schemas.generation import Count, Effort, Generation, Name, ToolName


class InputItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """A message, a function_call, a function_call_output, or reasoning.

    ``parsed_arguments``, which OpenAI's package adds, is inert; what else it adds is null.
    """

    type: Name | None = None
    role: Name | None = None
    content: str | list[Any] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    parsed_arguments: Any = None
    output: str | list[Any] | None = None
    summary: list[Any] | None = None
    encrypted_content: str | None = None
    phase: str | None = None
    caller: None = None
    namespace: None = None
    async_: None = None
    is_async: None = field(default=None, name="async")


class ResponsesTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call; ``strict`` is inert. There are no built-in tools."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(
    Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="function"
):
    """The function that must be called."""

    name: Name


class ResponsesAllowedTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """One of them."""

    type: Literal["function"]
    name: Name


class ResponsesAllowedTools(
    Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="allowed_tools"
):
    """The functions that may be called, or of which one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponsesAllowedTool], Meta(min_length=1, max_length=128)]


ToolChoice = Literal["none", "auto", "required"] | ResponsesToolChoice | ResponsesAllowedTools


class ResponseText(Struct, forbid_unknown_fields=True, kw_only=True):
    """What the text of the answer is."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextSettings(Struct, forbid_unknown_fields=True, kw_only=True):
    """``verbosity`` is inert."""

    format: ResponseText | None = None
    verbosity: str | None = None


class ReasoningSettings(Struct, forbid_unknown_fields=True, kw_only=True):
    """``summary`` is inert: reasoning comes as it is."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Generation, kw_only=True):
    """``previous_response_id`` needs a server that keeps responses; then ``store`` says which.
    ``conversation`` and ``background`` are refused.

    ``top_logprobs`` implies the ``include`` of logprobs. Inert: ``metadata``, ``user``,
    ``service_tier``, ``truncation`` unless ``auto``, ``prompt_cache_key``,
    ``prompt_cache_options``, ``prompt_cache_retention``, ``safety_identifier``, ``stream_options``,
    ``include`` of ``reasoning.encrypted_content``; and ``max_tool_calls``, which is about
    built-in tools.
    """

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_tool_calls: Count | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
