"""`StructuredOutputs`: a grammar that the output of a request must follow."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from ridgeline.core.errors import InvalidRequestError

MAX_SOURCE_CHARS = 1 << 18
MAX_CHOICES = 4096
MAX_JSON_DEPTH = 64


class GrammarKind(StrEnum):
    """How the source of a grammar is to be read."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    FORMAT = "format"
    PARTS = "parts"


class TextFormat(StrEnum):
    """Named formats of short outputs: ISO 8601 for the three last."""

    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    DATE = "date"
    TIME = "time"
    DATE_TIME = "date-time"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """``source`` is JSON text for schemas, choices and parts, the text itself for the other kinds.

    A grammar is Lark as llguidance writes it, or llama.cpp's GBNF. Parts are alternatives, each a
    list of {"text": …}, {"marker": …} (a special token where the vocabulary has it, else its text)
    and {"json": schema}, which follow one another.

    Two requests of one tenant with equal values share one compiled grammar.
    """

    kind: GrammarKind
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.kind, GrammarKind) or not isinstance(self.source, str):
            raise InvalidRequestError("structured_outputs has a kind and a source.")
        if not self.source or len(self.source) > MAX_SOURCE_CHARS:
            raise InvalidRequestError(
                f"structured_outputs.{self.kind} must have 1 to {MAX_SOURCE_CHARS} characters."
            )
        try:
            self.source.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"structured_outputs.{self.kind} contains surrogates, not valid Unicode."
            ) from error

    @classmethod
    def of(cls, value: object) -> Self | None:
        """From what a request says: a mapping with one of the kinds as its key, or nothing.

        Raises:
            InvalidRequestError: it is something else, too long, or nested too deep.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or len(value) != 1:
            raise InvalidRequestError(_EXPECTED)
        ((kind, source),) = value.items()
        if kind not in tuple(GrammarKind):
            raise InvalidRequestError(_EXPECTED)
        return cls(kind=GrammarKind(kind), source=_SOURCES[GrammarKind(kind)](source))


_EXPECTED = f"structured_outputs must have exactly one of {', '.join(GrammarKind)}."


def _schema(value: object) -> str:
    if isinstance(value, str):
        if len(value) > MAX_SOURCE_CHARS:
            raise InvalidRequestError(f"A schema may have {MAX_SOURCE_CHARS} characters at most.")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError("structured_outputs.json is not valid JSON.") from error
    if value is True:
        value = {}
    if not isinstance(value, Mapping):
        raise InvalidRequestError("structured_outputs.json must be a JSON Schema: an object.")
    _check_depth(value)
    try:
        # Key order is kept: it is the order in which properties are generated.
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(
            "structured_outputs.json holds something that is not JSON."
        ) from error


def _choice(value: object) -> str:
    if (
        not isinstance(value, list | tuple)
        or not 0 < len(value) <= MAX_CHOICES
        or not all(isinstance(each, str) and each for each in value)
    ):
        raise InvalidRequestError(
            f"structured_outputs.choice must be a list of 1 to {MAX_CHOICES} non-empty texts."
        )
    return json.dumps(list(value), ensure_ascii=False)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError("structured_outputs.regex and .grammar must be texts.")
    return value


def _format(value: object) -> str:
    if value not in tuple(TextFormat):
        raise InvalidRequestError(
            f"structured_outputs.format must be one of {', '.join(TextFormat)}."
        )
    return str(value)


def _parts(value: object) -> str:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_CHOICES:
        raise InvalidRequestError(
            f"structured_outputs.parts must be a list of 1 to {MAX_CHOICES} alternatives."
        )
    alternatives = []
    for alternative in value:
        if not isinstance(alternative, list | tuple) or not alternative:
            raise InvalidRequestError("Each alternative of structured_outputs.parts is a list.")
        alternatives.append([_part(part) for part in alternative])
    return json.dumps(alternatives, ensure_ascii=False)


def _part(part: object) -> dict[str, Any]:
    if isinstance(part, Mapping) and len(part) == 1:
        ((kind, value),) = part.items()
        if kind == "json":
            return {"json": json.loads(_schema(value))}
        if kind in ("text", "marker") and isinstance(value, str) and value:
            return {kind: value}
    raise InvalidRequestError(
        'Each of structured_outputs.parts is {"text": …}, {"marker": …} or {"json": schema}.'
    )


_SOURCES = {
    GrammarKind.JSON: _schema,
    GrammarKind.REGEX: _text,
    GrammarKind.CHOICE: _choice,
    GrammarKind.GRAMMAR: _text,
    GrammarKind.FORMAT: _format,
    GrammarKind.PARTS: _parts,
}


def _check_depth(value: Any) -> None:
    """Breadth first, so that a deep value is an error and not a stack overflow."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for each in level
            if isinstance(each, Mapping | list | tuple)
            for child in (each.values() if isinstance(each, Mapping) else each)
        ]
        if not level:
            return
        if len(level) > MAX_SOURCE_CHARS:
            raise InvalidRequestError(f"A schema may have {MAX_SOURCE_CHARS} characters at most.")
    raise InvalidRequestError(f"A schema may be nested {MAX_JSON_DEPTH} levels deep at most.")
