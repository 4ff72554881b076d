"""From what a request asks for to llguidance's own description of a grammar."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

from ridgeline.core.structured_outputs import GrammarKind, StructuredOutputs, TextFormat
from ridgeline.decoding.grammars.dates import DATE, OFFSET, TIME
from ridgeline.decoding.grammars.gbnf import is_gbnf, lark_from_gbnf
from ridgeline.decoding.grammars.schemas import lowered_schema

# As Python's json.dumps writes it. Without free whitespace a model cannot go on with blanks for
# ever, and more of the text is forced.
_JSON_OPTIONS: "JsonCompileOptions" = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}

_FORMATS = {
    TextFormat.INT: "-?(0|[1-9][0-9]{0,17})",
    TextFormat.FLOAT: r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?(e[+-]?[0-9]{1,2})?",
    TextFormat.BOOL: "true|false",
    TextFormat.DATE: DATE,
    TextFormat.TIME: TIME,
    TextFormat.DATE_TIME: f"{DATE}T{TIME}{OFFSET}?",
}


def grammar_source(wanted: StructuredOutputs, special: Mapping[str, int]) -> str:
    """The grammar as text for `LLMatcher`, which says what is wrong with it.

    ``special`` are the ids of special tokens by their text.

    Raises:
        ValueError: it cannot be translated; the message is for the caller.
    """
    match wanted.kind:
        case GrammarKind.JSON:
            schema = lowered_schema(json.loads(wanted.source))
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
                schema = lowered_schema(value)
                schema["x-guidance"] = _JSON_OPTIONS | schema.get("x-guidance", {})
                rules.append(f"{symbols[-1]}: %json {json.dumps(schema)}")
            elif kind == "marker" and value in special:
                symbols.append(f"<[{special[value]}]>")
            else:
                symbols.append(json.dumps(value))
        names.append(f"part_{number}")
        rules.append(f"{names[-1]}: {' '.join(symbols)}")
    return "\n".join([f"start: {' | '.join(names)}", *rules])
