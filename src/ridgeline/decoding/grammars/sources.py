"""From what a request asks for to llguidance's own description of a grammar."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

from ridgeline.core.structured_outputs import GrammarKind, StructuredOutputs, TextFormat
from ridgeline.decoding.grammars.gbnf import is_gbnf, lark_from_gbnf

# As Python's json.dumps writes it. Without free whitespace a model cannot go on with blanks for
# ever, and more of the text is forced.
_JSON_OPTIONS: "JsonCompileOptions" = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_OFFSET = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
# llguidance's own formats let the 31st of February through. RFC 3339 wants the offset.
_JSON_FORMATS = {"date": _DATE, "time": _TIME + _OFFSET, "date-time": f"{_DATE}T{_TIME}{_OFFSET}"}
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_DATA = frozenset({"const", "enum", "default", "examples"})  # values, not schemas
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_FORMATS = {
    TextFormat.INT: "-?(0|[1-9][0-9]{0,17})",
    TextFormat.FLOAT: r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?(e[+-]?[0-9]{1,2})?",
    TextFormat.BOOL: "true|false",
    TextFormat.DATE: _DATE,
    TextFormat.TIME: _TIME,
    TextFormat.DATE_TIME: f"{_DATE}T{_TIME}{_OFFSET}?",
}


def grammar_source(wanted: StructuredOutputs, special: Mapping[str, int]) -> str:
    """The grammar as text for `LLMatcher`, which says what is wrong with it.

    ``special`` are the ids of special tokens by their text.

    Raises:
        ValueError: it cannot be translated; the message is for the caller.
    """
    match wanted.kind:
        case GrammarKind.JSON:
            schema = _prepared(json.loads(wanted.source))
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON_OPTIONS)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(wanted.source)
        case GrammarKind.CHOICE:
            texts = json.loads(wanted.source)
            choices = " | ".join(json.dumps(text) for text in texts)
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case GrammarKind.FORMAT:
            return LLMatcher.grammar_from_regex(_FORMATS[TextFormat(wanted.source)])
        case GrammarKind.GRAMMAR:
            is_lark = not is_gbnf(wanted.source)
            lark = wanted.source if is_lark else lark_from_gbnf(wanted.source)
            return LLMatcher.grammar_from_lark(lark)
        case GrammarKind.PARTS:
            return LLMatcher.grammar_from_lark(_lark_from_parts(json.loads(wanted.source), special))


def _lark_from_parts(
    alternatives: Sequence[Sequence[Mapping[str, Any]]], special: Mapping[str, int]
) -> str:
    """A rule for each alternative, and one for each schema in it."""
    names, rules = [], []
    for number, alternative in enumerate(alternatives):
        symbols = []
        for place, part in enumerate(alternative):
            ((kind, value),) = part.items()
            if kind == "json":
                symbols.append(f"json_{number}_{place}")
                schema = {**_prepared(value), "x-guidance": _JSON_OPTIONS}
                rules.append(f"{symbols[-1]}: %json {json.dumps(schema)}")
            elif kind == "marker" and value in special:
                symbols.append(f"<[{special[value]}]>")
            else:
                symbols.append(json.dumps(value))
        names.append(f"part_{number}")
        rules.append(f"{names[-1]}: {' '.join(symbols)}")
    return "\n".join([f"start: {' | '.join(names)}", *rules])


def _prepared(schema: Any) -> Any:
    """The schema with patterns for dates and times that only real ones match.

    Raises:
        ValueError: it has what llguidance would take for something else.
    """
    if isinstance(schema, list):
        return [_prepared(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _prepared_value(key, value) for key, value in schema.items()}
    _check_integers(schema)
    name = schema.get("format")
    if isinstance(name, str) and name in _JSON_FORMATS and "pattern" not in schema:
        del schema["format"]
        schema["pattern"] = f"^({_JSON_FORMATS[name]})$"
    return schema


def _prepared_value(keyword: str, value: Any) -> Any:
    if keyword in _DATA:
        return value
    if keyword in _NAMED and isinstance(value, dict):
        return {name: _prepared(each) for name, each in value.items()}
    return _prepared(value)


def _check_integers(schema: Mapping[str, Any]) -> None:
    """Integers of llguidance end at 64 bits: it would write the last one that it has."""
    kinds = schema.get("type")
    if kinds != "integer" and not (isinstance(kinds, list) and "integer" in kinds):
        return
    for name, sign in _BOUNDS.items():
        bound = schema.get(name)
        if isinstance(bound, int | float) and sign * bound >= 2**63:
            raise ValueError(f"{name} is beyond integers of 64 bits.")
