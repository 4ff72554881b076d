"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ridgeline.server.schemas.generation import (
    Cost,
    Effort,
    Generation,
    Name,
    Positive,
    StopStrings,
    ToolName,
)


class Block(Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of a message: text, thinking, tool_use, tool_result, or a document that is text; and
    of a tool's result: text, or a tool_reference.

    ``cache_control``, ``citations``, ``signature`` and ``is_error`` are inert.
    """

    type: Name
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: str | list[Any] | None = None
    is_error: bool | None = None
    source: Any = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None
    title: str | None = None
    context: str | None = None


class TextSource(Struct, forbid_unknown_fields=True, kw_only=True):
    """What is in a document, as it is or in base64."""

    type: Literal["text", "base64"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class InputMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """A turn of the conversation; one of the system's is text."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call; ``input_schema`` is a JSON Schema.

    One with ``defer_loading`` is told where a tool_reference names it.
    ``strict``, ``cache_control`` and ``eager_input_streaming`` are inert.
    """

    name: ToolName
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None


class MessagesToolChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    """``any`` is one tool or another, ``tool`` the named one."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether the model reasons first, if its template can be asked; without it, it does not.

    ``budget_tokens`` and ``display`` are inert.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None
    display: str | None = None


class JsonOutput(Struct, forbid_unknown_fields=True, kw_only=True):
    """The text of the answer is JSON by a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """``effort`` is for templates that can be asked for it."""

    effort: Effort | None = None
    format: JsonOutput | None = None


class ThinkingTurns(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """So many of the last turns in which the model reasoned."""

    type: Literal["thinking_turns"] = "thinking_turns"
    value: Annotated[int, Meta(ge=1)]


class ContextEdit(Struct, forbid_unknown_fields=True, kw_only=True):
    """Reasoning of earlier turns is left out of the prompt; ``keep`` says of which it stays."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | ThinkingTurns = ThinkingTurns(value=1)


class ContextManagement(Struct, forbid_unknown_fields=True, kw_only=True):
    """What of the conversation the prompt leaves out. Nothing else than reasoning can be."""

    edits: Annotated[list[ContextEdit], Meta(max_length=1)] = []


class CountTokensRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What the prompt of a message would be."""

    model: Name | None = None
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=4096)]
    system: str | list[Block] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=128)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: Any = None


class MessagesRequest(Generation, kw_only=True):
    """``thread``, a conversation that the server would hold, is refused.

    ``metadata``, ``service_tier`` and ``cache_control`` are inert.
    """

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=4096)]
    max_tokens: Positive
    system: str | list[Block] | None = None
    stop_sequences: StopStrings | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=128)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: Any = None
    thread: dict[str, Any] | None = None


class MessagesUsage(Struct, kw_only=True):
    """``input_tokens`` leaves out those that were found in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cost: Cost | UnsetType = UNSET


class AnswerBlock(Struct, kw_only=True, omit_defaults=True):
    """A piece of the answer: text, thinking or tool_use."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessagesResponse(Struct, kw_only=True):
    """The whole answer, or its beginning in ``message_start``."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class CountTokensResponse(Struct, kw_only=True):
    """Tokens of the prompt."""

    input_tokens: int
