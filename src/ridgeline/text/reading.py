"""Reading a tokenizer's files, and turning every way in which they can be bad into one error."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ridgeline.core.errors import RidgelineError, TokenizerError

_CONFIG_LIMIT_BYTES = 64 << 20


@contextmanager
def backend_errors(what: str) -> Iterator[None]:
    """Raise TokenizerError for anything that the Rust library raises, panics included.

    A panic arrives as ``PanicException``, which is a BaseException.
    """
    try:
        yield
    except RidgelineError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"{what} ({type(error).__name__}).") from None
        raise


def read_bytes(path: Path, limit_bytes: int) -> bytes | None:
    """Return a file's bytes, None if it is not there; TokenizerError if unreadable or too big."""
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > limit_bytes:
            raise TokenizerError(f"{path.name} is larger than {limit_bytes >> 20} MiB.")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path.name} cannot be read ({type(error).__name__}).") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty if there is no file; TokenizerError if damaged."""
    data = read_bytes(path, _CONFIG_LIMIT_BYTES)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path.name} is not valid JSON.") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path.name} does not hold a JSON object.")
    return value
