"""Checking what a caller hands to a chat template, and copying it into plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.core.errors import InvalidRequestError

_MAX_DEPTH = 64
_MAX_ROLE_CHARS = 128
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def plain(value: Any, what: str, depth: int = 0) -> Any:
    """Copy JSON-like data; InvalidRequestError for other types or nesting beyond 64."""
    if depth > _MAX_DEPTH:
        raise InvalidRequestError(f"{what} is nested more than {_MAX_DEPTH} levels deep.")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value):
            raise InvalidRequestError(f"{what} has a key that is not a string.")
        return {str(key): plain(item, what, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, what, depth + 1) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    raise InvalidRequestError(f"{what} holds a {type(value).__name__}, which is not JSON.")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of a conversation, as transformers prepares it for a template.

    A message has a ``role``, and as ``content`` a string, a list of ``{"type": "text", "text": …}``
    or None, which is an empty string unless there are calls of tools. Keys that are None are
    dropped; reasoning is put under each name that templates read. Raises InvalidRequestError.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("The messages must be a list of at least one message.")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"Message {index} is not an object.")
        copied = plain(message, f"Message {index}")
        role = copied.get("role")
        if not isinstance(role, str) or not 0 < len(role) <= _MAX_ROLE_CHARS:
            raise InvalidRequestError(f"Message {index} has no role.")
        _check_content(copied.get("content"), index)
        if not copied.get("tool_calls"):
            if "content" not in copied:
                raise InvalidRequestError(f"Message {index} has no content.")
            copied["content"] = copied["content"] or ""
        copied = {key: value for key, value in copied.items() if value is not None}
        found = [copied[field] for field in _REASONING_FIELDS if field in copied]
        if found:
            copied = {"thinking": found[0], **copied, "reasoning_content": found[0]}
        checked.append(copied)
    return checked


def check_objects(values: Sequence[Mapping[str, Any]] | None, what: str) -> list[Any] | None:
    """Return a copy of ``tools`` or ``documents``; InvalidRequestError if not a list of objects."""
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidRequestError(f"{what} must be a list of objects.")
    if any(not isinstance(value, Mapping) for value in values):
        raise InvalidRequestError(f"{what} must be a list of objects.")
    copied: list[Any] = plain(list(values), what)
    return copied


def join_text_parts(messages: list[dict[str, Any]]) -> None:
    """Turn content parts into one string, parts joined by newlines (mutates the messages)."""
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "\n".join(part["text"] for part in message["content"])


def developers_are_system(messages: list[dict[str, Any]]) -> None:
    """Give a developer's messages the name that models had for them before (mutates them)."""
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"


def _check_content(content: Any, index: int) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequestError(f"The content of message {index} is not text or a list of parts.")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise InvalidRequestError(f"Message {index} has a content part that is not text.")
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"A text part of message {index} has no text.")
