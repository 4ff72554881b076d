"""Ids of calls: those that answers have, and those that chat templates take."""

import hashlib
import re
import secrets
import string
from collections.abc import Sequence
from typing import Any

_ALPHABET = string.ascii_letters + string.digits
_LENGTH = 9  # Mistral's templates take no other
_OURS = re.compile(r"(?:call_|toolu_)?([a-zA-Z0-9]{9})")


def new_call_id() -> str:
    """An id as every template takes it; routes may put a prefix before it."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))


def with_template_ids(messages: Sequence[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages with the ids of calls, and of their results, as the chat template takes them.

    Ours lose the prefix of their route. For Mistral's templates those of other servers become nine
    letters and digits, the same wherever an id occurs.
    """
    is_mistral = "[TOOL_CALLS]" in template
    return [_with_template_ids(message, is_mistral) for message in messages]


def _with_template_ids(message: dict[str, Any], is_mistral: bool) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if (call_id := message.get("tool_call_id")) is not None:
        changed["tool_call_id"] = _template_id(call_id, is_mistral)
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "id": _template_id(call["id"], is_mistral)} if "id" in call else call
            for call in calls
        ]
    return {**message, **changed}


def _template_id(call_id: str, is_mistral: bool) -> str:
    if ours := _OURS.fullmatch(call_id):
        return ours[1]
    return _digest(call_id) if is_mistral else call_id


def _digest(text: str) -> str:
    number, digits = int.from_bytes(hashlib.sha256(text.encode()).digest()), ""
    while len(digits) < _LENGTH:
        number, digit = divmod(number, len(_ALPHABET))
        digits += _ALPHABET[digit]
    return digits
