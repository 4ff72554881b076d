"""What a route gives back."""

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec

from ridgeline.server.errors import ApiFamily

_ENCODER = msgspec.json.Encoder()
encode = _ENCODER.encode
_LINE_BREAKS = [(char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole answer. ``body`` is bytes as they are, or anything that msgspec turns into JSON."""

    body: Any
    status: int = 200
    content_type: str = "application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def encoded(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else encode(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStream:
    """Server-sent events; what is raised before the first becomes a status of its own.

    With ``is_lines`` they are JSON objects, one a line, and nothing is sent in silence.
    """

    events: AsyncGenerator[bytes, None]
    ping: bytes = b": ping\n\n"
    is_lines: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReply:
    """The content of a file; ``open`` and reading it raise DiskError, and may block."""

    open: Callable[[], IO[bytes]]
    content_type: str = "application/octet-stream"
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event; JSON has no line breaks, so one ``data`` line is enough.

    Clients that split text by `str.splitlines`, as httpx does, take three characters more for line
    breaks: these are escaped.
    """
    text = b"data: " + encode(data) + b"\n\n"
    if b"\xc2\x85" in text or b"\xe2\x80" in text:
        for char, escaped in _LINE_BREAKS:
            text = text.replace(char, escaped)
    return text if name is None else b"event: " + name.encode() + b"\n" + text


def error_event(body: Any, family: ApiFamily) -> bytes:
    """The last event of a stream that breaks off; Anthropic's clients know it by its name."""
    return event(body, "error" if family is ApiFamily.ANTHROPIC else None)


def json_lines(values: AsyncGenerator[Any, None]) -> EventStream:
    """A stream of JSON objects, one a line."""

    async def lines() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(values):
            async for value in values:
                yield encode(value) + b"\n"

    return EventStream(events=lines(), is_lines=True)


DONE = b"data: [DONE]\n\n"
