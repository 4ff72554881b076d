"""A JSON Schema as a document: its references, and what is certain about the schemas in it."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAX_STEPS = 50_000  # of the work on one schema; some tenths of a second
MAX_NAMES = 64
OPTION = (
    'leave it out, or set "x-guidance": {"lenient": true} in the schema, '
    "which ignores what cannot be enforced."
)
TYPES = ("null", "boolean", "number", "string", "array", "object")
_SHAPES: dict[str, type | tuple[type, ...]] = {
    "type": (str, list),
    **dict.fromkeys(("enum", "required", "allOf", "anyOf", "oneOf", "prefixItems"), list),
    **dict.fromkeys(("properties", "patternProperties"), Mapping),
    **{f"{end}{kind}": int for end in ("min", "max") for kind in ("Items", "Properties", "Length")},
    "minContains": int,
}
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")  # `$ref` hides what is beside it


class SchemaDocument:
    """The whole, in which references lead somewhere. The work on it has a limited number of steps.

    ``guidance`` are the options of llguidance in it; ``names`` those of all its properties, if they
    are few.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.guidance = root.get("x-guidance")
        self._lenient = isinstance(self.guidance, Mapping) and bool(self.guidance.get("lenient"))
        draft = str(root.get("$schema", ""))
        self._ref_is_alone = any(name in draft for name in _OLD_DRAFTS)
        self._steps = 0
        self._anchors = dict(_anchors(root))
        names = set(itertools.islice(_property_names(root), MAX_NAMES * 16))
        self.names = sorted(names) if len(names) <= MAX_NAMES else []

    def spend(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise ValueError("its alternatives are too many; split it, or leave some out.")

    def unsupported(self, keyword: str, why: str) -> None:
        if not self._lenient:
            raise ValueError(f"{keyword} {why}; {OPTION}")

    def target(self, reference: str) -> Any:
        """What a reference leads to within the document."""
        if reference in self._anchors:
            return self._anchors[reference]
        base, _, pointer = reference.partition("#")
        value = self._anchors.get(base) if base else self.root
        for part in unquote(pointer).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                value = None
        if not isinstance(value, bool | Mapping) or (pointer and pointer[0] != "/"):
            raise ValueError(f"the reference {reference[:100]} leads to nothing in the schema.")
        return value

    def effective(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without what is beside a reference, where the draft says so."""
        for keyword, shape in _SHAPES.items():
            if keyword in schema and not isinstance(schema[keyword], shape):
                raise ValueError(f"{keyword} has a value that JSON Schema does not know.")
        for keyword in ("type", "required"):
            if not all(isinstance(each, str) for each in schema.get(keyword, ())):
                raise ValueError(f"{keyword} must be of texts.")
        if self._ref_is_alone and isinstance(schema.get("$ref"), str):
            return {"$ref": schema["$ref"]}
        return schema

    def conjuncts(self, schema: Any, depth: int = 0) -> list[Mapping[str, Any]]:
        """The schemas that must hold together: itself, and through `allOf` and `$ref`."""
        self.spend()
        if not isinstance(schema, Mapping) or depth > 8:
            return []
        schema = self.effective(schema)
        found = [schema]
        if isinstance(schema.get("$ref"), str):
            found += self.conjuncts(self.target(schema["$ref"]), depth + 1)
        for each in schema.get("allOf", ()):
            found += self.conjuncts(each, depth + 1)
        return found

    def finite(self, schema: Any) -> list[Any] | None:
        """All values of a schema, if they are few and listed."""
        for part in self.conjuncts(schema):
            if "const" in part:
                return [part["const"]]
            if isinstance(part.get("enum"), list):
                return [each for each in _distinct(part["enum"]) if _has_type(each, part)]
            if part.get("type") == "boolean":
                return [True, False]
        return None

    def disjoint(self, left: Any, right: Any, context: Any, depth: int = 0) -> bool:
        """Whether no value can satisfy both, for what is certain."""
        self.spend()
        if left is False or right is False:
            return True
        ours, theirs = self.conjuncts(left), self.conjuncts(right)
        both = [*ours, *theirs, *self.conjuncts(context)]
        kinds = set(TYPES) | {"integer"}
        for part in both:
            kinds &= _kinds_of(part)
        if not kinds:
            return True
        if depth > 4:
            return False
        listed = [values for part in both if (values := _listed(part)) is not None]
        refused = {
            _key(value)
            for part in both
            if isinstance(part.get("not"), Mapping)
            for value in (_listed(part["not"]) or () if len(part["not"]) == 1 else ())
        }
        if listed and not set.intersection(*({_key(v) for v in each} for each in listed)) - refused:
            return True
        for parts, other in ((ours, right), (theirs, left)):
            for part in parts:
                options = part.get("anyOf", part.get("oneOf"))
                if isinstance(options, list) and all(
                    self.disjoint(option, other, context, depth + 1) for option in options
                ):
                    return True
        if kinds != {"object"}:
            return False
        required = {name for part in both for name in part.get("required", ())}
        return any(
            self.disjoint(
                all_of([_property(part, name) for part in ours]),
                all_of([_property(part, name) for part in theirs]),
                True,
                depth + 1,
            )
            for name in sorted(required)
        )


def all_of(schemas: Iterable[Any]) -> Any:
    """What satisfies every one, simplified where that is plain."""
    needed = [each for each in schemas if each is not True and each != {}]
    if any(each is False for each in needed):
        return False
    return needed[0] if len(needed) == 1 else {"allOf": needed} if needed else True


def any_of(schemas: Iterable[Any]) -> Any:
    """What satisfies one of them, simplified where that is plain."""
    possible = [each for each in schemas if each is not False]
    if any(each is True or each == {} for each in possible):
        return True
    return possible[0] if len(possible) == 1 else {"anyOf": possible} if possible else False


def types_of(value: Any) -> list[str]:
    """The types that a `type` names."""
    return [value] if isinstance(value, str) else list(value)


def kind_of(value: Any) -> str:
    """The type of a value, by its name in a schema."""
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds.get(type(value), "number")


def _has_type(value: Any, schema: Mapping[str, Any]) -> bool:
    kind = kind_of(value)
    if kind == "number" and value == int(value):
        return bool(_kinds_of({k: v for k, v in schema.items() if k == "type"}) & {"integer"})
    return kind in _kinds_of({k: v for k, v in schema.items() if k == "type"})


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows; numbers are ``integer`` and ``number``, the others."""
    kinds = set(types_of(schema.get("type", [*TYPES])))
    if "number" in kinds:
        kinds.add("integer")
    if (values := _listed(schema)) is not None:
        found = {kind_of(each) for each in values}
        kinds &= found | ({"integer"} if "number" in found else set())
    return kinds


def _key(value: Any) -> str:
    """Equal for equal values: 1 and 1.0 are one, 1 and true are two."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(_key, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_key(value[k])}" for k in sorted(value)) + "}"
    return json.dumps(value)


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({_key(each): each for each in values}.values())


def _property(schema: Mapping[str, Any], name: str) -> Any:
    """What a schema says of one property."""
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _anchors(value: Any) -> Iterator[tuple[str, Any]]:
    """What can be referred to by a name of its own."""
    if isinstance(value, Mapping):
        for keyword in ("$id", "id", "$anchor"):
            if isinstance(name := value.get(keyword), str):
                yield (f"#{name}" if keyword == "$anchor" else name.removesuffix("#")), value
    if isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _anchors(each)


def _property_names(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(properties := value.get("properties"), Mapping):
            yield from properties
        if isinstance(required := value.get("required"), list):
            yield from (each for each in required if isinstance(each, str))
    if isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _property_names(each)
