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


def page_of(items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
