"""The texts that quality is measured on."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from ridgeline.core.errors import InvalidRequestError
from ridgeline.text import Tokenizer

Document = tuple[int, ...]
"""Token ids of one text."""


def heldout_texts(kind: str | None = None) -> list[str]:
    """The texts that the embedded model has not seen: "code", "prose" or, without a kind, both."""
    path = resources.files("ridgeline") / "assets/heldout/heldout.jsonl"
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [entry["text"] for entry in entries if kind in (None, entry["kind"])]


def read_texts(path: Path) -> list[str]:
    """The texts of a file: each line's ``text`` of a ``.jsonl``, the whole of any other.

    Raises:
        InvalidRequestError: it cannot be read, is not UTF-8, or a line has no text.
    """
    try:
        whole = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{path} is not UTF-8 text.") from None
    if path.suffix != ".jsonl":
        return [whole]
    texts = []
    for number, line in enumerate(whole.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise InvalidRequestError(f'Line {number} of {path} is not {{"text": "…"}}.')
        texts.append(text)
    return texts


def encode_documents(
    tokenizer: Tokenizer, texts: Sequence[str], *, max_tokens: int
) -> list[Document]:
    """The first tokens of each text, as a prompt is encoded; texts of less than two are left out.

    Raises:
        InvalidRequestError: no text is left.
    """
    encoded = (tuple(tokenizer.encode(text)[:max_tokens]) for text in texts)
    documents = [document for document in encoded if len(document) > 1]
    if not documents:
        raise InvalidRequestError("The text has no two tokens: there is nothing to predict.")
    return documents
