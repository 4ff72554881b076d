"""``/v1/chat/completions``."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ridgeline.core.sampling_params import MAX_LOGPROBS
from ridgeline.server.schemas.generation import (
    Effort,
    Name,
    OpenAIGeneration,
    Retraction,
    ToolName,
    Usage,
)

MAX_MESSAGES = 4096
MAX_TOOLS = 128
Arguments = dict[str, Any]


class ContentPart(Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of a message; only text is understood, and files of text."""

    type: Name
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    file: dict[str, Any] | None = None
    cache_control: Any = None


class CalledFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """``arguments`` is JSON text, as the model wrote it."""

    name: Name
    arguments: str | Arguments = ""


class EarlierFunction(CalledFunction, kw_only=True):
    """``parsed_arguments``, which OpenAI's package adds, is inert."""

    parsed_arguments: Any = None


class MessageToolCall(Struct, kw_only=True):
    """A call that the model made earlier."""

    id: str | None = None
    type: str = "function"
    function: EarlierFunction


class ChatMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """``refusal``, ``annotations``, ``audio`` and ``function_call`` come back in histories.

    ``parsed``, which OpenAI's package adds, is inert.
    """

    role: Annotated[str, Meta(min_length=1, max_length=128)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Any = None
    parsed: Any = None
    audio: None = None
    function_call: None = None


class FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """``parameters`` is a JSON Schema; ``strict`` is inert."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """Which function."""

    name: Name


class NamedToolChoice(
    Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="function"
):
    """The function that must be called."""

    function: NamedFunction


class AllowedTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """One of them."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Struct, forbid_unknown_fields=True, kw_only=True):
    """The functions that may be called, or of which one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(
    Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="allowed_tools"
):
    """Some of the tools."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice


class ChatRequest(OpenAIGeneration, kw_only=True):
    """``verbosity`` is inert."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: str | None = None


class TokenLogprob(Struct, kw_only=True):
    """A token, and how likely it was; ``bytes`` is its UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob, kw_only=True):
    """A token of the output and the alternatives to it."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """One entry per token of the output."""

    content: list[ChosenLogprob]


class ToolCallOut(Struct, kw_only=True):
    """A complete call."""

    id: str
    type: str = "function"
    function: CalledFunction


class AnswerMessage(Struct, kw_only=True, omit_defaults=True):
    """``reasoning`` and ``reasoning_content`` are one text under the two names in use."""

    role: str
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallOut] | None = None


class ChatChoice(Struct, kw_only=True, omit_defaults=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatResponse(Struct, kw_only=True, omit_defaults=True):
    """A whole answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class FunctionDelta(Struct, kw_only=True, omit_defaults=True):
    """The name comes once, the arguments in pieces."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to a call."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta


class Delta(Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to an answer."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Struct, kw_only=True, omit_defaults=True):
    """The delta of one answer; its last may take back some of those before."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    retraction: Retraction | None = None


class ChatChunk(Struct, kw_only=True, omit_defaults=True):
    """An event of a stream; the last has usage and no choices, if usage was asked for.

    ``prompt_token_ids`` are in the first.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
