"""JSON Schemas of wide variety: some by hand, most generated over all keywords."""

import random

STRING = {"type": "string", "maxLength": 8}
BY_HAND = [
    True,
    {},
    {"type": "null"},
    {"type": "boolean"},
    {"const": {"a": [1, None]}},
    {"enum": ["a", 1, None, {"b": 2.5}, [True]]},
    {"type": ["integer", "null"]},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9, "minimum": 0}},
    {"type": "array", "prefixItems": [{"type": "boolean"}, STRING], "items": False},
    {"type": "array", "items": {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 2}},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "integer", "minimum": -17, "maximum": 4096},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    {"oneOf": [{"const": "x"}, {"type": "object", "properties": {"y": {"const": 1}}}]},
    {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 7}]},
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {
        "type": "object",
        "properties": {"kind": {"enum": ["card", "cash"]}, "note": STRING},
        "required": ["kind"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 6, "description": "a name"},
            "größe": {"type": "number"},
            'quoted "key"': {"type": "boolean"},
            "a/b~c": {"type": "null"},
        },
        "required": ["name", "größe", 'quoted "key"', "a/b~c"],
        "additionalProperties": False,
    },
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid", "ipv4")),
    *({"type": "string", "format": name} for name in ("email", "hostname", "uri", "duration")),
]
_PATTERNS = ("^[a-z]+$", "^(ab|cd)*$", r"^\d{1,4}$", "x", '^[^"\\\\]{0,4}$', "^a?b?c?$")


def generated(seed: int) -> dict:
    """A random schema; some use what no value or no compiler can satisfy."""
    return _Generator(random.Random(seed)).any(3)


class _Generator:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def maybe(self, schema: dict, chance: float, **fields) -> dict:
        return schema | {k: v for k, v in fields.items() if self.rng.random() < chance}

    def any(self, depth: int) -> dict:
        kinds = [self.string, self.number, self.integer, self.enum, self.simple]
        if depth:
            kinds += [self.object, self.object, self.array, self.combined, self.nullable]
        return self.rng.choice(kinds)(depth)

    def simple(self, depth: int) -> dict:
        return {"type": self.rng.choice(["null", "boolean"])}

    def string(self, depth: int) -> dict:
        low = self.rng.randint(0, 3)
        if self.rng.random() < 0.3:
            return {"type": "string", "pattern": self.rng.choice(_PATTERNS)}
        return self.maybe({"type": "string"}, 0.7, minLength=low, maxLength=low + 4)

    def integer(self, depth: int) -> dict:
        low = self.rng.randint(-50, 50)
        schema = {"type": "integer"}
        if self.rng.random() < 0.2:
            return schema | {"multipleOf": self.rng.randint(2, 9), "minimum": 0, "maximum": 90}
        return self.maybe(schema, 0.6, minimum=low, maximum=low + self.rng.randint(0, 300))

    def number(self, depth: int) -> dict:
        low = self.rng.randint(-5, 5)
        if self.rng.random() < 0.5:
            return self.maybe({"type": "number"}, 0.5, minimum=low, maximum=low + 2.5)
        return {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 1}

    def enum(self, depth: int) -> dict:
        values = ["red", "grün", "", 0, -1.5, None, True, [1, "x"], {"k": []}, "日本"]
        if self.rng.random() < 0.3:
            return {"const": self.rng.choice(values)}
        return {"enum": self.rng.sample(values, self.rng.randint(1, 4))}

    def object(self, depth: int) -> dict:
        names = self.rng.sample(["id", "name", "größe", "a b", "x.y", "items", "ok"], 4)
        names = names[: self.rng.randint(0, 4)]
        schema = {
            "type": "object",
            "properties": {name: self.any(depth - 1) for name in names},
            "required": [name for name in names if self.rng.random() < 0.6],
        }
        extra = self.rng.random()
        if extra < 0.6:
            schema["additionalProperties"] = False
        elif extra < 0.8:
            schema["additionalProperties"] = self.integer(0)
        return schema

    def array(self, depth: int) -> dict:
        low = self.rng.randint(0, 2)
        schema = {"type": "array", "items": self.any(depth - 1)}
        if self.rng.random() < 0.25:
            prefix = [self.any(0) for _ in range(self.rng.randint(1, 3))]
            return {"type": "array", "prefixItems": prefix, "items": False, "minItems": len(prefix)}
        return self.maybe(schema, 0.7, minItems=low, maxItems=low + self.rng.randint(0, 2))

    def combined(self, depth: int) -> dict:
        if self.rng.random() < 0.4:
            return {
                "$defs": {"part": self.any(depth - 1)},
                "type": "array",
                "items": {"$ref": "#/$defs/part"},
                "maxItems": 2,
            }
        word = self.rng.choice(["anyOf", "anyOf", "oneOf", "allOf"])
        if word == "allOf":
            return {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 60}]}
        return {word: [self.any(depth - 1) for _ in range(self.rng.randint(1, 3))]}

    def nullable(self, depth: int) -> dict:
        schema = self.any(0)
        return {"anyOf": [schema, {"type": "null"}]}
