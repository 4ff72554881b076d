"""Pages of lists, as OpenAI's clients walk through them."""

from typing import Any

from ridgeline.server.context import Call
from ridgeline.server.errors import bad_request


def page_limit(call: Call, most: int, default: int = 20) -> int:
    """The ``limit`` of a query; ApiError if it is out of bounds."""
    text = call.query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise bad_request(f"limit must be a number from 1 to {most}.", "limit")
    return int(text)


def page_ends(call: Call) -> tuple[str | None, str | None]:
    """The ``after_id`` or ``before_id`` of Anthropic's clients; ApiError if there are both."""
    after, before = (call.query.get(name) or None for name in ("after_id", "before_id"))
    if after is not None and before is not None:
        raise bad_request("after_id and before_id exclude each other.", "before_id")
    return after, before


def page_of(items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
