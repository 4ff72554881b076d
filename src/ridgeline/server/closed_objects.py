"""JSON Schemas whose objects have the properties that are named, and no others."""

from typing import Any

_MAX_DEPTH = 64
_OPENERS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_COMPOSERS = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "dependentSchemas")
_OF_SCHEMAS = ("properties", "$defs", "definitions")  # mappings of schemas by name
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "contains", "additionalProperties")


def closed(schema: Any, depth: int = 0) -> Any:
    """The schema with ``additionalProperties: false`` in each object that lists its properties.

    JSON Schema leaves objects open, and a model that may invent keys does. ``additionalProperties``
    of any value stays. So does an object that is put together of several schemas (``allOf``,
    ``$ref`` beside ``properties``, …) or requires what it does not list: closing a part of it would
    leave nothing that fits.
    """
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return schema
    found = dict(schema)
    for name in _OF_SCHEMAS:
        if isinstance(each := found.get(name), dict):
            found[name] = {key: closed(value, depth + 1) for key, value in each.items()}
    for name in _LISTS:
        if isinstance(each := found.get(name), list):
            found[name] = [closed(value, depth + 1) for value in each]
    for name in _SINGLE:
        if isinstance(found.get(name), dict):
            found[name] = closed(found[name], depth + 1)
    properties, required = found.get("properties"), found.get("required", [])
    is_closable = (
        isinstance(properties, dict)
        and isinstance(required, list)
        and all(name in properties for name in required if isinstance(name, str))
        and not any(name in found for name in (*_OPENERS, *_COMPOSERS))
    )
    if is_closable:
        found["additionalProperties"] = False
    return found
