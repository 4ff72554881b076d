"""``/v1/batches``, ``/v1/messages/batches`` and ``/v1/files``."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Raw, Struct

from ridgeline.server.schemas.generation import Name

_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]


class BatchRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``input_file_id``: a file with purpose batch. ``output_expires_after`` is refused."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=64)]
    endpoint: Name
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Key, _Value], Meta(max_length=16)] | None = None
    output_expires_after: Any = None


class MessageBatchLine(Struct, forbid_unknown_fields=True, kw_only=True):
    """``params``: what would be posted to ``/v1/messages``."""

    custom_id: Annotated[
        str,
        Meta(
            pattern=r"^[a-zA-Z0-9_-]{1,64}(?!\n)$",
            description="1 to 64 letters of a to z, digits, dashes and underscores",
        ),
    ]
    params: Raw


class MessageBatchRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Messages, to be answered when there is time; what they hold is left as it came."""

    max_parts: ClassVar[int] = 1 << 20
    max_elements: ClassVar[int] = 1 << 20

    requests: Annotated[list[MessageBatchLine], Meta(min_length=1)]


PURPOSES = ("batch", "user_data")  # of uploads
OUTPUT_PURPOSE = "batch_output"
UPLOAD_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": [*PURPOSES]},
    },
    "additionalProperties": False,
}
PAGE_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "after": {"type": "string"},
}
MESSAGE_BATCHES_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
    "after_id": {"type": "string"},
    "before_id": {"type": "string"},
}
_ORDER = {"type": "string", "enum": ["asc", "desc"]}
ITEMS_QUERY: dict[str, dict[str, Any]] = {**PAGE_QUERY, "order": _ORDER}
FILES_QUERY: dict[str, dict[str, Any]] = {
    **PAGE_QUERY,
    "limit": {"type": "integer", "minimum": 1, "maximum": 10_000},
    "order": _ORDER,
    "purpose": {"type": "string", "enum": [*PURPOSES, OUTPUT_PURPOSE]},
}
