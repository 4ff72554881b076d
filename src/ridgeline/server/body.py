"""Request bodies: bounded in size, depth and time, and decoded by their schema."""

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

import msgspec

from ridgeline.server.errors import ApiError, bad_request

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MAX_DEPTH = 100
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*?)`", re.DOTALL)


class ClientDisconnectedError(Exception):
    """The client went away before its request was complete."""


def declared_length(headers: dict[bytes, bytes], limit: int) -> int | None:
    """The Content-Length, if there is one; ApiError 413 if it is over the limit."""
    text = headers.get(b"content-length")
    if text is None:
        return None
    if not text.isdigit() or len(text) > 18:
        raise bad_request("The Content-Length is not a number.")
    length = int(text)
    if length > limit:
        raise too_large(limit)
    return length


def too_large(limit: int) -> ApiError:
    """For a body over the limit, in bytes."""
    return ApiError(413, f"The body is larger than {limit:,} bytes.", code="request_too_large")


async def read_body(receive: Receive, *, limit: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 for one over ``limit`` bytes, 408 for one that is not here in time.
        ClientDisconnectedError: the client went away.
    """
    parts = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnectedError
                parts += message.get("body", b"")
                if len(parts) > limit:
                    raise too_large(limit)
                if not message.get("more_body", False):
                    return bytes(parts)
    except TimeoutError:
        raise ApiError(408, "The body did not arrive in time.") from None


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as its schema says.

    Raises:
        ApiError: 400 that names the field at fault.
    """
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise bad_request(f"The JSON is nested more than {MAX_DEPTH} levels deep.")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise bad_request("The JSON is nested too deep.") from None


def _depth(body: bytes) -> int:
    """How deep the JSON nests; brackets within strings do not count."""
    depth = deepest = 0
    for match in _TOKENS.finditer(body):
        token = match.group()[0]
        if token in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif token in b"]}":
            depth -= 1
    return deepest


def _invalid(text: str) -> ApiError:
    """msgspec's message in words, and the field that it is about."""
    path = _PATH.search(text)
    where = path.group(1) if path else ""
    what = _PATH.sub("", text).replace("`", "").replace(" | null", "")
    if (unknown := _UNKNOWN.search(text)) is not None:
        where = f"{where}.{unknown.group(1)}".lstrip(".")[:80]
        return bad_request(f"{where}: this field is not known.", where, "unknown_field")
    missing = re.search(r"missing required field `(\w+)`", text)
    if missing is not None:
        where = f"{where}.{missing.group(1)}".lstrip(".")
        return bad_request(f"{where}: this field is required.", where, "missing_field")
    what = what[:1].lower() + what[1:]
    return bad_request(f"{where}: {what}." if where else f"The body: {what}.", where or None)
