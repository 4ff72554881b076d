"""Conversations and tools, from whichever interface they came, as a chat template takes them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ridgeline.server.closed_objects import closed
from ridgeline.server.errors import bad_request

Choice = Literal["auto", "none", "required"]

_MOST_ARGUMENT_CHARS = 1 << 20
TOLD_PARSER = "hermes"  # which reads what models are told to write by the instructions
_INSTRUCTIONS = (
    "You may call functions. Each is described by a JSON object on a line of its own:\n{tools}\n"
    "To call one, answer with <tool_call>"
    '{{"name": <function name>, "arguments": <JSON object>}}</tool_call>'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A function that the model may call; ``parameters`` is a JSON Schema.

    ``is_deferred``: the prompt does not begin with it; a later message tells the model of it.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    is_deferred: bool = False

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """Of what a call gives it: an object, whether ``parameters`` say so or not."""
        schema: dict[str, Any] = closed({"type": "object", **(self.parameters or {})})
        return schema

    def as_template_input(self) -> dict[str, Any]:
        """The form that templates read, which is OpenAI's."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """What is asked of the model.

    ``messages`` are template inputs. ``allowed``: names of the tools that may be called,
    ``None`` for all. ``parallel_calls``: whether an answer may hold more than one call.
    """

    messages: list[dict[str, Any]]
    tools: tuple[ToolSpec, ...] = ()
    choice: Choice = "auto"
    allowed: tuple[str, ...] | None = None
    parallel_calls: bool = True
    documents: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise bad_request("Two tools have the same name.", "tools")
        if names and all(tool.is_deferred for tool in self.tools):
            raise bad_request("One tool must be there without defer_loading.", "tools")
        for tool in self.tools:
            kind = tool.arguments_schema["type"]
            if "object" not in (kind if isinstance(kind, list) else [kind]):
                raise bad_request(f"The arguments of {tool.name!r} must be an object.", "tools")
        if not set(self.allowed or ()) <= set(names):
            raise bad_request("tool_choice names a tool that is not in tools.", "tool_choice")
        if self.choice == "required" and not names:
            raise bad_request("tool_choice needs tools.", "tool_choice")

    @property
    def offered_tools(self) -> tuple[ToolSpec, ...]:
        """The tools whose calls are read. Where a grammar says which is called, these are all: the
        prompt then begins alike, and is found in the cache, whichever are allowed."""
        match self.choice:
            case "none":
                return ()
            case "auto":
                return self.callable
            case "required":
                return self.tools

    @property
    def told_tools(self) -> tuple[ToolSpec, ...]:
        """Those of them that the prompt begins with."""
        return tuple(tool for tool in self.offered_tools if not tool.is_deferred)

    @property
    def continued_text(self) -> str:
        """What the last message has so far, if the answer goes on with it."""
        return text_of(self.messages[-1].get("content")) if self.continue_final_message else ""

    @property
    def callable(self) -> tuple[ToolSpec, ...]:
        """The tools that may be called."""
        allowed = self.allowed
        return tuple(tool for tool in self.tools if allowed is None or tool.name in allowed)

    def call_schema(self) -> dict[str, Any] | None:
        """JSON Schema of the call that must be made, ``None`` where the model may choose."""
        if self.choice != "required":
            return None
        definitions: dict[str, Any] = {}
        calls = []
        for tool in self.callable:
            parameters = tool.arguments_schema
            for key in ("$defs", "definitions"):  # references start at the root
                for name, schema in (parameters.pop(key, None) or {}).items():
                    if definitions.setdefault(key, {}).setdefault(name, schema) != schema:
                        raise bad_request(f"Two tools define {name!r} differently.", "tools")
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": tool.name}, "arguments": parameters},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **definitions}


def explain_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[ToolSpec]
) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: they are described in words.

    Earlier calls and results become text.
    """
    lines = "\n".join(json.dumps(tool.as_template_input()["function"]) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=lines) if tools else ""
    explained = [_as_text(message) for message in messages]
    if not instructions:
        return explained
    if explained and explained[0]["role"] in ("system", "developer"):
        first = explained[0]
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *explained[1:]]
    return [{"role": "system", "content": instructions}, *explained]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    text = text_of(message.get("content"))
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{text}</tool_response>"}
    calls = [
        f"<tool_call>{json.dumps(call['function'], ensure_ascii=False)}</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join(part for part in (text, *calls) if part)}


def text_of(content: Any) -> str:
    """Content as one string."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def call_input(call_id: str | None, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """An earlier call as templates read it: arguments are an object if they can be, and are not
    longer than any context."""
    if isinstance(arguments, str) and len(arguments) <= _MOST_ARGUMENT_CHARS:
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}
