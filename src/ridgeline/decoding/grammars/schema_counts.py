"""How many properties an object may have, and which names; arrays without equal items."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ridgeline.decoding.grammars.patterns import literals_pattern
from ridgeline.decoding.grammars.schema_document import OPTION, SchemaDocument, any_of, types_of
from ridgeline.decoding.grammars.schema_values import other_types

MAX_ALTERNATIVES = 2_000  # of one keyword


def unique_items(document: SchemaDocument, schema: Mapping[str, Any]) -> list[Any]:
    """All orders of up to six different values, the order of the schema for up to ten."""
    most = schema.get("maxItems", math.inf)
    if most <= 1 or ("type" in schema and "array" not in types_of(schema["type"])):
        return []
    values = document.finite(schema.get("items", True))
    if values is None or "prefixItems" in schema:
        document.unsupported("uniqueItems", "needs items of an enum")
        return []
    lengths = range(schema.get("minItems", 0), min(most, len(values)) + 1)
    if len(values) <= 6 and sum(math.perm(len(values), n) for n in lengths) <= MAX_ALTERNATIVES:
        orders: Iterable[Sequence[Any]] = itertools.chain.from_iterable(
            itertools.permutations(values, n) for n in lengths
        )
    elif len(values) <= 10:  # 2 ** 10 subsets
        orders = itertools.chain.from_iterable(itertools.combinations(values, n) for n in lengths)
    else:
        document.unsupported("uniqueItems", f"of {len(values)} values allows too many arrays")
        return []
    return [any_of([{"type": other_types(["array"])}, {"enum": [list(each) for each in orders]}])]


def property_names(document: SchemaDocument, wanted: Any, schema: Mapping[str, Any]) -> list[Any]:
    """Names as a pattern: the rest is no property."""
    pattern: str | None = None
    for part in document.conjuncts(wanted):
        keys = part.keys() - {"type", "description", "title", "$comment", "$ref", "allOf"}
        values = document.finite(part)
        if values is not None:
            names = [each for each in values if isinstance(each, str)]
            found = literals_pattern(names)
        elif keys == {"pattern"}:
            found = part["pattern"]
        elif keys and keys <= {"minLength", "maxLength"}:
            found = f"^(?s:.){{{part.get('minLength', 0)},{part.get('maxLength', '')}}}$"
        elif not keys or keys == {"format"}:
            continue
        else:
            found = None
        if found is None or pattern is not None:
            document.unsupported("propertyNames", "is enforced for an enum, a pattern or a length")
            return []
        pattern = found
    if pattern is None:
        return []
    if "patternProperties" in schema:
        document.unsupported("propertyNames", "is not enforced beside patternProperties")
        return []
    return [{"patternProperties": {pattern: True}, "additionalProperties": False}]


def counted_properties(document: SchemaDocument, schema: Mapping[str, Any]) -> list[Any]:
    """Which of the optional properties there are, as llguidance counts none of these."""
    required = set(schema.get("required", ()))
    optional = [name for name in schema["properties"] if name not in required]
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    least = max(schema.get("minProperties", 0) - len(required), 0)
    most = schema.get("maxProperties", math.inf) - len(required)
    if not optional:
        bounds = {n: schema[n] for n in ("minProperties", "maxProperties") if n in schema}
        return [bounds] if bounds else []
    if least == 0 and most == math.inf:
        return []
    if most < 0:
        return [{"type": other_types(["object"])}]
    alternatives: list[Any] = [{"type": other_types(["object"])}]
    if most == math.inf:  # at least so many of them, or fewer and others
        sizes: Iterable[int] = (least,) if least <= len(optional) else ()
        alternatives += _subsets(document, optional, sizes, exact=False)
        if not closed:
            rest = {"minProperties": schema["minProperties"]}
            alternatives += _subsets(document, optional, range(least), exact=True, beside=rest)
    elif closed:
        sizes = range(least, min(int(most), len(optional)) + 1)
        alternatives += _subsets(document, optional, sizes, exact=True)
    else:
        bounds = {n: schema[n] for n in ("minProperties", "maxProperties") if n in schema}
        sizes = range(min(int(most), len(optional)) + 1)
        alternatives += _subsets(document, optional, sizes, exact=True, beside=bounds)
    return [any_of(alternatives)]


def _subsets(
    document: SchemaDocument,
    names: Sequence[str],
    sizes: Iterable[int],
    *,
    exact: bool,
    beside: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Objects that have some of these properties, and if exact no others of them."""
    sizes = [size for size in sizes if size <= len(names)]
    count = sum(math.comb(len(names), size) for size in sizes)
    if count > MAX_ALTERNATIVES:
        raise ValueError(
            f"minProperties and maxProperties over {len(names)} optional properties allow "
            f"too many combinations; {OPTION}"
        )
    document.spend(count)
    chosen = itertools.chain.from_iterable(itertools.combinations(names, n) for n in sizes)
    return [
        {
            "type": "object",
            "required": list(each),
            **({"properties": dict.fromkeys(set(names) - set(each), False)} if exact else {}),
            **(beside or {}),
        }
        for each in chosen
    ]
