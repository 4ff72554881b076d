"""Request bodies: bounded in size and depth, and decoded by their schema."""

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ridgeline.core.spelling import suggestion
from ridgeline.server.absent_fields import instead_of_field
from ridgeline.server.errors import ApiError, bad_request
from ridgeline.server.schemas.choices import (
    choices,
    field_names,
    leave_out_unknown,
    only_number,
    rule,
)

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MAX_DEPTH = 100
# Decoding holds the interpreter's lock, at up to 0.4 µs a part and 80 ns an element.
MAX_PARTS = 131_072  # arrays, objects and fields of objects
MAX_ELEMENTS = 500_000
MAX_EXTREME_NUMBERS = 1_000  # with exponents of three digits, which take up to 35 µs each
_BLOCK = 1 << 16
_QUOTE, _COLON, _COMMA = 2, 3, 4
_MARKS = b'[{]}":,'
_STEPS = bytes.maketrans(_MARKS, bytes((1, 1, 255, 255, _QUOTE, _COLON, _COMMA)))  # 255 is -1
_UNMARKED = bytes(set(range(256)) - set(_MARKS))
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_WRONG_CHOICE = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`", re.DOTALL)


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


def check_encoding(headers: dict[bytes, bytes]) -> None:
    """ApiError 415 for a body that is compressed."""
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if encoding.lower() != "identity":
        raise ApiError(415, f"Bodies are read as they are, not in {encoding[:40]!r}.")


def too_large(limit: int) -> ApiError:
    """For a body over the limit, in bytes."""
    return ApiError(413, f"The body is larger than {limit:,} bytes.", code="request_too_large")


async def read_body(
    receive: Receive, *, limit: int, on_bytes: Callable[[int], object] = lambda _: None
) -> bytes:
    """The whole body; the connection ends if it does not come in time (`http.py`). ``on_bytes``
    is told of each piece before it is kept.

    Raises:
        ApiError: 413 for one over ``limit`` bytes.
        ClientDisconnectedError: the client went away.
    """
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        piece = message.get("body", b"")
        if len(parts) + len(piece) > limit:
            raise too_large(limit)
        on_bytes(len(piece))
        parts += piece
        if not message.get("more_body", False):
            return bytes(parts)


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes, *, name: str = "The body") -> T:
    """The body as its schema says; ``name`` is how errors call it.

    Raises:
        ApiError: 400 that names the field at fault.
    """
    if len(body) > 4 * MAX_EXTREME_NUMBERS and _has_extreme_numbers(body):
        raise bad_request(
            f"The JSON has more than {MAX_EXTREME_NUMBERS:,} numbers with exponents of 3 digits."
        )
    num_open = body.count(b"[") + body.count(b"{")
    has_many = body.count(b":") > MAX_PARTS - MAX_DEPTH or body.count(b",") >= MAX_ELEMENTS
    if num_open > MAX_DEPTH or has_many:
        schema = decoder.type
        max_parts = getattr(schema, "max_parts", MAX_PARTS)
        _check_structure(body, max_parts, getattr(schema, "max_elements", MAX_ELEMENTS))
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(error, decoder.type) from None
    except UnicodeDecodeError:
        raise bad_request(f"{name} is not valid UTF-8.", code="invalid_json") from None
    except msgspec.DecodeError as error:
        if not body.strip():
            raise bad_request(f"{name} is empty.", code="invalid_json") from None
        raise bad_request(f"{name} is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The JSON is nested too deep.") from None


def decode_request(
    decoder: msgspec.json.Decoder[T], body: bytes, unknown_fields: Literal["refuse", "ignore"]
) -> tuple[T, list[str]]:
    """The body as its schema says, and the paths of the fields that were ignored.

    Raises:
        ApiError: as `decode_body`.
    """
    try:
        return decode_body(decoder, body), []
    except ApiError as error:
        if error.code != "unknown_field" or unknown_fields == "refuse":
            raise
    value = msgspec.json.decode(body)
    ignored = leave_out_unknown(decoder.type, value)
    return decode_body(decoder, msgspec.json.encode(value)), ignored


def _has_extreme_numbers(body: bytes) -> bool:
    """Whether there are too many, strings aside. NumPy gives the lock away."""
    if _num_extreme(np.frombuffer(body, dtype=np.uint8)) <= MAX_EXTREME_NUMBERS:
        return False
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = np.frombuffer(unescaped, dtype=np.uint8)
    is_text = np.bitwise_xor.accumulate(marks == ord('"'))
    return _num_extreme(np.where(is_text, np.uint8(0), marks)) > MAX_EXTREME_NUMBERS


def _num_extreme(text: npt.NDArray[np.uint8]) -> int:
    """How often an E, and a sign or none, stand before three digits."""
    is_digit = (text - ord("0")) < 10
    three = is_digit[:-2] & is_digit[1:-1] & is_digit[2:]
    is_exponent = (text | 0x20) == ord("e")
    is_sign = (text == ord("+")) | (text == ord("-"))
    signed = is_exponent[:-4] & is_sign[1:-3] & three[2:]
    return int(np.count_nonzero(is_exponent[:-3] & three[1:]) + np.count_nonzero(signed))


def _check_structure(body: bytes, max_parts: int, max_elements: int) -> None:
    """What is within strings does not count. Takes a few ns a byte, since the event loop waits."""
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = np.frombuffer(unescaped.translate(_STEPS, _UNMARKED), dtype=np.int8)
    depth = parts = commas = 0
    in_text = False
    for start in range(0, len(marks), _BLOCK):
        block = marks[start : start + _BLOCK]
        is_text = np.bitwise_xor.accumulate(block == _QUOTE) ^ in_text
        steps = np.where(is_text, np.int8(0), block)
        colons, is_comma = steps == _COLON, steps == _COMMA
        steps[steps >= _QUOTE] = 0
        depths = depth + np.cumsum(steps, dtype=np.int32)
        depth, in_text = int(depths[-1]), bool(is_text[-1])
        parts += int(np.count_nonzero(steps > 0) + np.count_nonzero(colons))
        commas += int(np.count_nonzero(is_comma))
        if depths.max() > MAX_DEPTH:
            raise bad_request(f"The JSON is nested more than {MAX_DEPTH} levels deep.")
        if parts > max_parts:
            raise bad_request(f"The JSON has more than {max_parts:,} arrays, objects and fields.")
        if commas >= max_elements:
            raise bad_request(f"The JSON has {max_elements:,} commas or more.")


def invalid(error: msgspec.ValidationError, schema: Any) -> ApiError:
    """msgspec's message in words, and the field that it is about."""
    text = str(error)
    path = _PATH.search(text)
    where = path.group(1).removesuffix("[...]") if path else ""
    what = _PATH.sub("", text).replace("`", "").replace(" | null", "")
    if (unknown := _UNKNOWN.match(text)) is not None:
        name = unknown.group(1)[:80]
        known = field_names(schema, where)
        is_of_chat = {"chat_template_kwargs", "max_tokens"} <= set(known)
        meant = suggestion(name, known)
        if not where:
            meant = instead_of_field(name, known, is_of_chat=is_of_chat)
        where = f"{where}.{name}".lstrip(".")
        return bad_request(f"{where}: this field is not known{meant}", where, "unknown_field")
    missing = re.search(r"missing required field `(\w+)`", text)
    if missing is not None:
        where = f"{where}.{missing.group(1)}".lstrip(".")
        return bad_request(f"{where}: this field is required.", where, "missing_field")
    wrong = _WRONG_CHOICE.match(what)
    if (off := only_number(schema, where)) is not None:
        what = f"this is not done here, and may only be off, which is {off:g}"
    elif "matching regex" in what and (text_rule := rule(schema, where)) is not None:
        what = f"this must be {text_rule}"
    elif wrong is not None and (allowed := choices(schema, where)):
        what = f"{wrong.group(1)[:80]} is not one of {', '.join(allowed)}"
    what = what[:1].lower() + what[1:]
    return bad_request(f"{where}: {what}." if where else f"The body: {what}.", where or None)
