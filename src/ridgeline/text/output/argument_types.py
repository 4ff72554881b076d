"""Arguments that a model wrote as plain text, as JSON of the types that their schema names."""

import json
from collections.abc import Mapping
from typing import Any

from ridgeline.text.output.literals import literal

_MAX_REFERENCES = 8
_MAX_LITERAL_CHARS = 1 << 16
_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    list: "array",
    dict: "object",
}
_ANY = frozenset(_TYPES.values())
_ONLY_TEXT = frozenset({"string"})


def argument_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that the schema of a tool's parameters allows for one of them.

    Text is all there is for a parameter that the schema does not have; one that has no type may be
    of any.
    """
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping) or name not in properties:
        return _ONLY_TEXT
    schema = _resolved(properties[name], parameters)
    options = [schema]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            options = [_resolved(option, parameters) for option in schema[key]]
    types = frozenset().union(*(_named_types(option) for option in options))
    return types if types and types <= _ANY else _ANY


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a text, read as a value of these types; a JSON string where it is none.

    ``null`` and Python's ``None`` are null where that is allowed, or where text is not. Else, where
    text is among several types that a schema names, it is text.
    """
    is_any = types == _ANY
    if text.lower() in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if is_any or "string" not in types:
        try:
            value = _value(text)
            if is_any or _fits(value, types):
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        if len(text) > _MAX_LITERAL_CHARS:
            raise
        return literal(text.strip())


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = _TYPES[type(value)]
    return kind in types or (kind == "integer" and "number" in types)


def _named_types(schema: Mapping[str, Any]) -> set[str]:
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {each for each in named if isinstance(each, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return {_TYPES[type(value)] for value in values} if isinstance(values, list) else set()


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema behind its references into ``root``; an empty one where they lead nowhere."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for key in reference.removeprefix("#/").split("/"):
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return {}
