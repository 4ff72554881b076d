"""JSON Schema in the keywords that llguidance enforces.

`oneOf` that is not disjoint, `not`, `if`, `dependencies` and their like become unions and
intersections of what llguidance has. A negation is pushed down to the keywords, so that what cannot
be said exactly may only lose texts, and never lets an invalid one through.

Every function takes schemas as JSON and leaves them as they are. ``True`` and ``False`` are
schemas, too.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.decoding.grammars.dates import DATE, OFFSET, TIME
from ridgeline.decoding.grammars.patterns import matches_name
from ridgeline.decoding.grammars.schema_counts import (
    counted_properties,
    property_names,
    unique_items,
)
from ridgeline.decoding.grammars.schema_document import (
    SchemaDocument,
    all_of,
    any_of,
    types_of,
)
from ridgeline.decoding.grammars.schema_values import other_types, other_values, rejected_values

MAX_POSITIONS = 8  # of an array in which `contains`, or an item that `not` wants, is looked for

# What llguidance enforces; others are annotations. Dates and times are ours: it lets the 31st of
# February through. RFC 3339 wants the offset.
_FORMATS = {name: name for name in ("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")}
_FORMATS |= {"iri": "uri", "idn-email": "email", "idn-hostname": "hostname"}  # those in ASCII
_POINTER = "(/([^~/]|~[01])*)*"
_FORMAT_PATTERNS = {
    "date": DATE,
    "time": TIME + OFFSET,
    "date-time": f"{DATE}T{TIME}{OFFSET}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
}
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_LISTS = frozenset({"allOf", "anyOf", "prefixItems"})
_REPLACED = frozenset({"then", "else", "minContains", "maxContains", "additionalItems"})
# References are replaced, so what they lead to and what they start from has done its work.
_DROPPED = frozenset({"$defs", "definitions", "$id", "id", "$anchor", "$schema", "x-guidance"})
_DROPPED |= {"title", "description", "default", "examples", "$comment", "deprecated"}


def lowered_schema(schema: Any) -> Any:
    """The same schema, or one that allows less, in keywords of llguidance as far as it has them.

    Raises:
        ValueError: a keyword cannot be enforced, a reference leads nowhere, or the schema is too
            large; the message is for the caller.
    """
    if not isinstance(schema, dict):
        return schema
    try:
        return _Lowering(schema).document()
    except RecursionError:
        raise ValueError("its references are nested too deep.") from None


class _Lowering:
    """The work on one document, in a limited number of steps."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._document = SchemaDocument(root)
        self._references: dict[str, str] = {}
        self._pending: list[str] = []
        self._parts: dict[str, Any] = {}
        self._negating: list[str] = []

    def document(self) -> Any:
        """The whole, with a definition for each schema that something refers to."""
        root = self._positive(self._document.root)
        if not isinstance(root, dict):
            root = {"allOf": [root]}
        definitions = self._parts
        while self._pending:
            reference = self._pending.pop()
            definitions[self._references[reference]] = self._positive(
                self._document.target(reference)
            )
        if definitions:
            root = _without_impossible({**root, "$defs": definitions})
        return (
            root
            if self._document.guidance is None
            else {**root, "x-guidance": self._document.guidance}
        )

    def _shared(self, lowered: Any) -> Any:
        """The same by reference, for what is said in several places."""
        if not isinstance(lowered, Mapping):
            return lowered
        name = f"part{len(self._parts)}"
        self._parts[name] = lowered
        return {"$ref": f"#/$defs/{name}"}

    def _positive(self, schema: Any) -> Any:
        """What satisfies a schema."""
        self._document.spend()
        if not isinstance(schema, Mapping):
            return schema
        schema = self._document.effective(schema)
        _check_integers(schema)
        kept: dict[str, Any] = {}
        more: list[Any] = []
        for keyword, value in schema.items():
            if keyword in _DROPPED or keyword in _REPLACED:
                continue
            rewritten = self._rewritten(keyword, value, schema)
            if rewritten is not None:
                more += rewritten
            else:
                self._keep(kept, keyword, value, schema)
        return all_of([kept, *more]) if more else kept

    def _keep(
        self, kept: dict[str, Any], keyword: str, value: Any, schema: Mapping[str, Any]
    ) -> None:
        """A keyword that llguidance has, with what is in it made plain."""
        match keyword, value:
            case "$ref", str():
                if value not in self._references:
                    self._references[value] = f"ref{len(self._references)}"
                    self._document.target(value)
                    self._pending.append(value)
                kept[keyword] = f"#/$defs/{self._references[value]}"
            case "properties", dict():
                patterns = schema.get("patternProperties", {}).items()
                kept[keyword] = {
                    name: any(each == value[name] and matches_name(p, name) for p, each in patterns)
                    or self._positive(value[name])
                    for name in value
                }
            case "patternProperties", dict():
                kept[keyword] = {each: self._positive(value[each]) for each in value}
            case name, list() if name in _LISTS:
                kept[keyword] = [self._positive(each) for each in value]
            case "items", list():
                kept["prefixItems"] = [self._positive(each) for each in value]
                if "additionalItems" in schema:
                    kept["items"] = self._positive(schema["additionalItems"])
            case (("items" | "additionalProperties"), _):
                kept[keyword] = self._positive(value)
            case "enum" | "const", _:
                self._document.spend(len(value) // 8 if isinstance(value, list) else 1)
                kept[keyword] = value
            case _:
                kept[keyword] = value

    def _rewritten(self, keyword: str, value: Any, schema: Mapping[str, Any]) -> list[Any] | None:
        """What must hold instead of a keyword; None if the keyword is kept."""
        match keyword, value:
            case "format", str():
                if value in _FORMAT_PATTERNS:
                    return [{"pattern": f"^({_FORMAT_PATTERNS[value]})$"}]
                return [{"format": _FORMATS[value]}] if value in _FORMATS else []
            case "oneOf", list():
                return [self._one_of(value, schema)]
            case "not", bool() | Mapping():
                return [self._negative(value)]
            case "if", bool() | Mapping():
                return [self._conditional(value, schema)]
            case (("dependencies" | "dependentRequired" | "dependentSchemas"), Mapping()):
                return [self._dependency(*each) for each in value.items()]
            case "uniqueItems", bool():
                return unique_items(self._document, schema) if value else []
            case "contains", bool() | Mapping():
                return self._contains(value, schema)
            case "propertyNames", bool() | Mapping():
                return property_names(self._document, value, schema)
            case (("minProperties" | "maxProperties"), int()):
                if not schema.get("properties"):
                    return None
                counted = "minProperties" if "minProperties" in schema else "maxProperties"
                return counted_properties(self._document, schema) if keyword == counted else []
            case "unevaluatedProperties" | "unevaluatedItems", _:
                return self._unevaluated(keyword, value, schema)
        return None

    def _one_of(self, options: Sequence[Any], schema: Mapping[str, Any]) -> Any:
        """Each option without those that it may overlap."""
        context = {"type": schema["type"]} if "type" in schema else True
        alternatives = []
        for place, option in enumerate(options):
            others = [
                self._negative(other)
                for index, other in enumerate(options)
                if index != place and not self._document.disjoint(option, other, context)
            ]
            alternatives.append(all_of([self._positive(option), *others]))
        return any_of(alternatives)

    def _conditional(self, condition: Any, schema: Mapping[str, Any]) -> Any:
        then, otherwise = schema.get("then", True), schema.get("else", True)
        if then is True and otherwise is True:
            return True
        return any_of(
            [
                all_of([self._positive(condition), self._positive(then)]),
                all_of([self._negative(condition), self._positive(otherwise)]),
            ]
        )

    def _dependency(self, name: str, wanted: Any) -> Any:
        needed = {"required": [name, *wanted]} if isinstance(wanted, list) else {"required": [name]}
        then = True if isinstance(wanted, list) else self._positive(wanted)
        return any_of([_absent(name), all_of([needed, then])])

    def _contains(self, wanted: Any, schema: Mapping[str, Any]) -> list[Any]:
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        if least == 0 and most is None:
            return []
        if least != 1 or most is not None or "prefixItems" in schema:
            self._document.unsupported(
                "contains", "is enforced for one item and without prefixItems"
            )
            return []
        return [any_of(self._somewhere(self._positive(wanted), schema.get("maxItems")))]

    def _somewhere(self, wanted: Any, max_items: Any) -> list[Any]:
        """Arrays with such an item in one of the first positions."""
        if wanted is False:
            return []
        wanted = self._shared(wanted)
        most = min(max_items, MAX_POSITIONS) if isinstance(max_items, int) else MAX_POSITIONS
        return [
            {"type": "array", "prefixItems": [True] * place + [wanted], "minItems": place + 1}
            for place in range(most)
        ] + [{"type": other_types(["array"])}]

    def _unevaluated(self, keyword: str, value: Any, schema: Mapping[str, Any]) -> list[Any]:
        """What is not evaluated is what is additional, where nothing else evaluates."""
        others = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas")
        if value is True:
            return []
        if any(name in schema for name in (*others, "$dynamicRef", "contains")):
            self._document.unsupported(keyword, "is not enforced beside other schemas")
            return []
        if keyword == "unevaluatedItems":
            if "items" in schema:
                return []
            return [{"prefixItems": [True] * len(schema.get("prefixItems", ())), "items": value}]
        if "additionalProperties" in schema:
            return []
        properties = dict.fromkeys(schema.get("properties", ()), True)
        patterns = dict.fromkeys(schema.get("patternProperties", ()), True)
        return [
            {
                "properties": properties,
                "patternProperties": patterns,
                "additionalProperties": self._positive(value),
            }
        ]

    def _negative(self, schema: Any) -> Any:
        """What violates a schema, as far as it can be said."""
        self._document.spend()
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, Mapping):
            return False
        schema = self._document.effective(schema)
        found: list[Any] = []
        for keyword, value in schema.items():
            found += self._violations(keyword, value, schema)
        return any_of(found)

    def _violations(self, keyword: str, value: Any, schema: Mapping[str, Any]) -> list[Any]:
        match keyword, value:
            case "$ref", str():
                if value in self._negating:
                    return []
                self._negating.append(value)
                found = self._negative(self._document.target(value))
                self._negating.pop()
                return [found]
            case "type", str() | list():
                return [{"type": rest}] if (rest := other_types(types_of(value))) else []
            case "const", _:
                return other_values([value])
            case "enum", list():
                self._document.spend(len(value))
                return other_values(value)
            case "allOf", list():
                return [self._negative(each) for each in value]
            case "anyOf", list():
                return [all_of([self._negative(each) for each in value])]
            case "oneOf", list():
                pairs = itertools.combinations(value, 2)
                return [
                    all_of([self._negative(each) for each in value]),
                    *(
                        all_of([self._positive(one), self._positive(two)])
                        for one, two in pairs
                        if not self._document.disjoint(one, two, True)
                    ),
                ]
            case "not", _:
                return [self._positive(value)]
            case "if", _:
                return self._broken_condition(value, schema)
            case "required", list():
                return [{"type": "object", **_absent(name)} for name in value]
            case (("dependencies" | "dependentRequired" | "dependentSchemas"), Mapping()):
                return [self._broken_dependency(*each) for each in value.items()]
            case (("items" | "prefixItems"), _):
                return self._wrong_items(keyword, value, schema)
            case "contains", bool() | Mapping() if "minContains" not in schema:
                return [all_of([{"type": "array"}, {"items": self._negative(value)}])]
            case (("properties" | "patternProperties" | "additionalProperties"), _):
                return self._wrong_properties(keyword, value, schema)
        return rejected_values(keyword, value, schema)

    def _broken_condition(self, condition: Any, schema: Mapping[str, Any]) -> list[Any]:
        return [
            all_of([self._positive(condition), self._negative(schema.get("then", True))]),
            all_of([self._negative(condition), self._negative(schema.get("else", True))]),
        ]

    def _broken_dependency(self, name: str, wanted: Any) -> Any:
        missing = {"required": wanted} if isinstance(wanted, list) else wanted
        return all_of([{"type": "object", "required": [name]}, self._negative(missing)])

    def _wrong_items(self, keyword: str, value: Any, schema: Mapping[str, Any]) -> list[Any]:
        if isinstance(value, list):
            wrong = [(place, self._negative(each)) for place, each in enumerate(value)]
        else:
            start = len(schema.get("prefixItems", ())) if keyword == "items" else 0
            item = self._shared(self._negative(value))
            wrong = [(place, item) for place in range(start, start + MAX_POSITIONS)]
            self._document.spend(len(wrong))
        return [
            {"type": "array", "prefixItems": [True] * place + [item], "minItems": place + 1}
            for place, item in wrong
            if item is not False
        ]

    def _wrong_properties(self, keyword: str, value: Any, schema: Mapping[str, Any]) -> list[Any]:
        """One property that is not as wanted: of names that the document has, or of any other."""
        if keyword == "properties":
            wrong = {name: self._negative(value[name]) for name in value}
        elif keyword == "patternProperties":
            wrong = {}
            for pattern, each in value.items():
                names = [name for name in self._document.names if matches_name(pattern, name)]
                wrong.update(dict.fromkeys(names, self._shared(self._negative(each))))
                self._document.spend(len(names))
        else:
            listed = set(schema.get("properties", ()))
            patterns = list(schema.get("patternProperties", ()))
            others = [
                name
                for name in self._document.names
                if name not in listed
                and all(matches_name(each, name) is False for each in patterns)
            ]
            self._document.spend(len(others))
            item = self._shared(self._negative(value))
            if item is False:
                return []
            wrong = dict.fromkeys(others, item)
            if not patterns:
                unlisted = {
                    "type": "object",
                    "properties": dict.fromkeys(schema.get("properties", ()), False),
                    "additionalProperties": item,
                    "minProperties": 1,
                }
                return [unlisted, *_with_property(wrong)]
        return _with_property(wrong)


def _without_impossible(root: dict[str, Any]) -> Any:
    """References to what nothing satisfies, which llguidance does not look through, in place."""
    impossible = {f"#/$defs/{name}" for name, each in root["$defs"].items() if each is False}

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [replaced(each) for each in value]
        if not isinstance(value, dict):
            return value
        if value.get("$ref") in impossible:
            return False
        return {k: v if k in ("enum", "const") else replaced(v) for k, v in value.items()}

    return replaced(root) if impossible else root


def _absent(name: str) -> dict[str, Any]:
    return {"properties": {name: False}}


def _with_property(wanted: Mapping[str, Any]) -> list[Any]:
    return [
        {"type": "object", "required": [name], "properties": {name: value}}
        for name, value in wanted.items()
        if value is not False
    ]


def _check_integers(schema: Mapping[str, Any]) -> None:
    """Integers of llguidance end at 64 bits: it would write the last one that it has."""
    kinds = schema.get("type")
    if kinds != "integer" and not (isinstance(kinds, list) and "integer" in kinds):
        return
    for name, sign in _BOUNDS.items():
        bound = schema.get(name)
        if isinstance(bound, int | float) and sign * bound >= 2**63:
            raise ValueError(f"{name} is beyond integers of 64 bits.")
