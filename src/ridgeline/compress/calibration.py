"""The text that a model is calibrated with, as windows of tokens."""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.compress.recipe import EMBEDDED, WindowChoice
from ridgeline.core.errors import ChatTemplateError, InvalidRequestError, TokenizerError
from ridgeline.engine.loading import ModelDescription
from ridgeline.evaluation import Document
from ridgeline.text import ChatTemplate

_OVERLAP_TOKENS = 50
_SUFFIXES = (".txt", ".md", ".py", ".jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationText:
    """Windows of token ids, and where they are from."""

    source: str
    windows: tuple[Document, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.windows))

    @property
    def digest(self) -> str:
        """SHA-256 of the windows."""
        return hashlib.sha256(json.dumps(self.windows).encode()).hexdigest()

    def check_apart(self, documents: Sequence[Document]) -> None:
        """
        Raises:
            InvalidRequestError: 50 tokens in a row of what quality is measured on are here too.
        """
        _check_apart(f"calibration text ({self.source})", self.windows, documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingText:
    """Token ids in a row, and where they are from."""

    source: str
    tokens: Document

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens."""
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()

    def check_apart(self, documents: Sequence[Document]) -> None:
        """As of `CalibrationText`."""
        _check_apart(f"training text ({self.source})", [self.tokens], documents)


def _check_apart(name: str, texts: Sequence[Document], documents: Sequence[Document]) -> None:
    seen = {part for document in documents for part in _parts(document)}
    firsts = {part[0] for part in seen}
    if any(part in seen for text in texts for part in _parts(text, firsts)):
        raise InvalidRequestError(
            f"The {name} has {_OVERLAP_TOKENS} tokens in a row of the text that quality is "
            "measured on: its figures would mean nothing. Give another text for one of them."
        )


def calibration_text(source: str, model: ModelDescription, recipe: WindowChoice) -> CalibrationText:
    """Windows of a file's or a folder's texts: all of them, or a choice by the recipe's seed.

    ``source`` is ``embedded``, a text file, a JSONL of ``{"text": …}`` or of ``{"messages": […]}``
    (which the model's template renders), or a folder of such files. Texts are encoded as prompts
    are, joined, and cut; windows are no longer than the model's context, and the last may be
    shorter.

    Raises:
        InvalidRequestError: it cannot be read, or has no two tokens.
        TokenizerError: the model has none.
        ChatTemplateError: there are conversations, and the model has no usable template.
    """
    length = min(recipe.window_tokens, model.definition.spec.max_position)
    tokens = training_text(source, model).tokens
    windows = [tuple(tokens[first : first + length]) for first in range(0, len(tokens), length)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise InvalidRequestError(f"The calibration text ({source}) has no two tokens.")
    if len(windows) > recipe.num_windows:
        order = np.random.default_rng(recipe.seed).permutation(len(windows))
        windows = [windows[index] for index in sorted(order[: recipe.num_windows].tolist())]
    return CalibrationText(source=source, windows=tuple(windows))


def training_text(source: str, model: ModelDescription) -> TrainingText:
    """All of a file's or a folder's texts, one behind the other; see `calibration_text`."""
    if model.tokenizer is None:
        raise TokenizerError("The model has no tokenizer: no text can be read for it.")
    tokens: list[int] = []
    for text in _texts(source, model.chat_template):
        tokens += model.tokenizer.encode(text)
    return TrainingText(source=source, tokens=tuple(tokens))


def _parts(tokens: Document, firsts: Collection[int] | None = None) -> Iterator[Document]:
    """Runs of tokens; of those that begin with one of ``firsts``."""
    for first in range(len(tokens) - _OVERLAP_TOKENS + 1):
        if firsts is None or tokens[first] in firsts:
            yield tokens[first : first + _OVERLAP_TOKENS]


def _texts(source: str, template: ChatTemplate | None) -> Iterator[str]:
    if source == EMBEDDED:
        embedded = resources.files("ridgeline") / "assets/calibration/calibration.jsonl"
        yield from _of_lines(embedded.read_text(encoding="utf-8"), EMBEDDED, template)
        return
    path = Path(source)
    files = [path]
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in _SUFFIXES)
    for file in files:
        try:
            whole = file.read_text(encoding="utf-8")
        except OSError as error:
            reason = error.strerror or error
            raise InvalidRequestError(f"{file} cannot be read: {reason}.") from None
        except UnicodeDecodeError:
            raise InvalidRequestError(f"{file} is not UTF-8 text.") from None
        if file.suffix == ".jsonl":
            yield from _of_lines(whole, str(file), template)
        else:
            yield whole


def _of_lines(whole: str, name: str, template: ChatTemplate | None) -> Iterator[str]:
    for number, line in enumerate(whole.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict) and isinstance(entry.get("text"), str):
            yield entry["text"]
        elif isinstance(entry, dict) and isinstance(entry.get("messages"), list):
            if template is None:
                raise ChatTemplateError(
                    f"{name} has conversations, and the model has no chat template."
                )
            yield template.render(entry["messages"], add_generation_prompt=False)
        else:
            raise InvalidRequestError(
                f'Line {number} of {name} is neither {{"text": "…"}} nor {{"messages": […]}}.'
            )
