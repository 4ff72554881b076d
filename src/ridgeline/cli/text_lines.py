"""Texts from a file or standard input, one a line: as they are, or as JSON."""

import json
import sys
from pathlib import Path

from ridgeline.core.errors import DiskError, InvalidRequestError


def read_texts(path: Path | None) -> list[str]:
    """The lines of a UTF-8 file, or of standard input without one; empty ones are left out.

    A line of JSON is a string, or an object with ``text``; of a ``.jsonl`` file every line is.

    Raises:
        DiskError: the file cannot be read.
        InvalidRequestError: it is not UTF-8, has no lines, or a line of JSON has no text.
    """
    try:
        data = sys.stdin.buffer.read() if path is None else path.read_bytes()
    except OSError as error:
        raise DiskError(f"{path or 'Standard input'} cannot be read: {error.strerror}.") from error
    try:
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequestError("The input is not UTF-8.") from error
    is_json = path is not None and path.suffix == ".jsonl"
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    texts = [_text(line, number, is_json=is_json) for number, line in numbered]
    if not texts:
        raise InvalidRequestError("The input has no text: give a line for each.")
    return texts


def _text(line: str, number: int, *, is_json: bool) -> str:
    if not is_json and line.lstrip()[0] not in '"{':
        return line
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        if not is_json:
            return line  # prose that begins so
        value = None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidRequestError(f'Line {number} is not {{"text": "…"}}, nor a string in JSON.')
    return text
