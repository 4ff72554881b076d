"""What violates a keyword that holds no schema, as schemas."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ridgeline.decoding.grammars.patterns import pattern_without, rejected_pattern
from ridgeline.decoding.grammars.schema_document import TYPES, kind_of

MAX_SIZES = 8


def other_types(types: Collection[str]) -> list[str]:
    """The other types. Numbers that are no integers have no name, so they are left out."""
    return [
        each for each in TYPES if each not in types and (each != "number" or "integer" not in types)
    ]


def other_values(values: Sequence[Any]) -> list[Any]:
    """Values that are none of these."""
    texts = [each for each in values if isinstance(each, str)]
    numbers = sorted({each for each in values if kind_of(each) == "number"})
    flags = [each for each in (True, False) if not any(each is one for one in values)]
    found: list[Any] = [{"type": "string"} if not texts else None]
    if texts:
        found = [{"type": "string", "pattern": pattern_without(texts)}]
    edges = [None, *numbers, None]
    for low, high in itertools.pairwise(edges):
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        found.append({"type": "number", **{k: v for k, v in bounds.items() if v is not None}})
    if flags:
        found.append({"enum": flags})
    if not any(each is None for each in values):
        found.append({"type": "null"})
    for kind in ("array", "object"):
        same = [each for each in values if kind_of(each) == kind]
        found += _other_lengths(kind, same) if same else [{"type": kind}]
    return found


def rejected_values(keyword: str, value: Any, schema: Mapping[str, Any]) -> list[Any]:
    """Values that a keyword of one number or pattern refuses."""
    if keyword == "pattern" and isinstance(value, str):
        rejected = rejected_pattern(value)
        return [] if rejected is None else [{"type": "string", "pattern": rejected}]
    if not isinstance(value, int | float) or isinstance(value, bool):
        return []
    old_exclusive = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}.get(keyword)
    if old_exclusive and schema.get(old_exclusive) is True:
        return [{"type": "number", "maximum" if keyword == "minimum" else "minimum": value}]
    opposite = {
        "minimum": ("number", "exclusiveMaximum"),
        "maximum": ("number", "exclusiveMinimum"),
        "exclusiveMinimum": ("number", "maximum"),
        "exclusiveMaximum": ("number", "minimum"),
    }.get(keyword)
    if opposite:
        return [{"type": opposite[0], opposite[1]: value}]
    kinds = {"Length": "string", "Items": "array", "Properties": "object"}
    kind = kinds.get(keyword[3:])
    if kind is None or keyword[:3] not in ("min", "max"):
        return []
    if keyword[:3] == "max":
        return [{"type": kind, f"min{keyword[3:]}": int(value) + 1}]
    return [{"type": kind, f"max{keyword[3:]}": int(value) - 1}] if value > 0 else []


def _other_lengths(kind: str, values: Sequence[Any]) -> list[Any]:
    """Arrays or objects of sizes that none of these has."""
    sizes = {len(each) for each in values}
    name = {"array": "Items", "object": "Properties"}[kind]
    found: list[Any] = [
        {"type": kind, f"min{name}": size, f"max{name}": size}
        for size in range(max(sizes))
        if size not in sizes
    ][:MAX_SIZES]
    return [*found, {"type": kind, f"min{name}": max(sizes) + 1}]
