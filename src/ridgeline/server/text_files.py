"""Files of text within a request, in base64, as OpenAI's and Anthropic's clients send them."""

import base64
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ridgeline.server.errors import bad_request

_DATA_URL = re.compile(
    r"data:text/[\w.+-]+(?:;charset=(?:utf-8|us-ascii))?;base64,(.*)", re.IGNORECASE | re.DOTALL
)


class TextFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's form: ``file_data`` is a data URL."""

    file_data: str
    filename: str | None = None


def text_of_file(file: Mapping[str, Any] | None, where: str) -> str:
    """The name of a file of OpenAI's form and its text, each on lines of its own.

    Raises:
        ApiError: 400 for any other file than one of text.
    """
    given = {name: value for name, value in (file or {}).items() if value is not None}
    try:
        found = msgspec.convert(given, TextFile)
        match = _DATA_URL.fullmatch(found.file_data)
    except msgspec.ValidationError:
        match = None
    if match is None:
        text = "this model reads files of text, as file_data: data:text/plain;base64,…"
        raise bad_request(f"{where}: {text}", where)
    return "\n".join(part for part in (found.filename, text_of_base64(match[1], where)) if part)


def text_of_base64(data: str, where: str) -> str:
    """
    Raises:
        ApiError: 400 where it is not UTF-8 in base64.
    """
    try:
        return base64.b64decode(data, validate=True).decode()
    except ValueError:
        raise bad_request(f"{where}: the file is not UTF-8 text in base64.", where) from None
