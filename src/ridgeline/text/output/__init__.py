"""What a model's text means: reasoning, tool calls and content, told apart while it streams."""

from ridgeline.text.output.call_grammars import call_parts
from ridgeline.text.output.events import (
    Content,
    Event,
    OutputParser,
    Reasoning,
    ToolArguments,
    ToolCall,
)
from ridgeline.text.output.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    choose_reasoning_parser,
    choose_tool_parser,
    output_parser,
    reads_special_tokens,
)

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Content",
    "Event",
    "OutputParser",
    "Reasoning",
    "ToolArguments",
    "ToolCall",
    "call_parts",
    "choose_reasoning_parser",
    "choose_tool_parser",
    "output_parser",
    "reads_special_tokens",
]
