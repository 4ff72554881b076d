"""Keywords that llguidance lacks are enforced: what `jsonschema` says, the grammar says."""

import json
import re

import jsonschema
import pytest
from llguidance import LLTokenizer, TokenizerWrapper
from tests.decoding.grammars.conftest import allowed

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.decoding.grammars import GrammarCompiler
from ridgeline.decoding.grammars.check_worker import Bytes
from ridgeline.decoding.grammars.schema_document import OPTION

CAT = {"properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"properties": {"kind": {"const": "dog"}, "barks": {"type": "boolean"}}, "required": ["kind"]}
PETS = {"$defs": {"Cat": {"type": "object", **CAT}, "Dog": {"type": "object", **DOG}}}
ABC = {"type": "object", "properties": {name: {"type": "integer"} for name in "abc"}}
CLOSED = {**ABC, "additionalProperties": False}
TREE = {"type": "object", "properties": {"sub": {"$ref": "#/$defs/tree"}, "x": {"type": "integer"}}}

# Of each: the schema, what it allows, and what it refuses.
CASES = [
    ({"type": "array", "uniqueItems": False}, [[1, 1]], [{}]),
    ({"type": "string", "format": "topic"}, ["x"], [1]),
    ({"type": "string", "format": "json-pointer"}, ["", "/a/~0"], ["a", "/~2"]),
    (
        {
            **PETS,
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "discriminator": {"propertyName": "kind"},
        },
        [{"kind": "cat", "lives": 9}, {"kind": "dog", "barks": True}],
        [{"kind": "cow"}, {"lives": 9}, {"kind": "cat", "lives": "x"}],
    ),
    (
        {
            **PETS,
            "type": "array",
            "items": {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]},
        },
        [[], [{"kind": "dog"}, {"kind": "cat"}]],
        [[{"kind": "cow"}]],
    ),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ["x", None], [1]),
    (
        {**ABC, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1, "c": 2}],
        [{}, {"a": 1, "b": 1}],
    ),
    (
        {"type": "integer", "oneOf": [{"minimum": 5}, {"maximum": 8}]},
        [4, 9],
        [5, 8],
    ),
    ({"type": "string", "oneOf": [{"minLength": 2}, {"maxLength": 3}]}, ["a", "abcd"], ["abc"]),
    ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ["a", "c"], ["b", "d"]),
    (
        {"oneOf": [{"type": "string"}, {"type": "string", "pattern": "^ab"}]},
        ["", "a", "ac", "bb"],
        ["ab", "abc"],
    ),
    ({"oneOf": [CLOSED, {**CLOSED, "required": ["a"]}]}, [{}, {"b": 1}], [{"a": 1}]),
    ({**ABC, "dependencies": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    (
        {**ABC, "dependentRequired": {"a": ["b", "c"], "b": ["c"]}},
        [{"c": 1}, {"b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}],
        [{"b": 1}, {"a": 1, "c": 1}],
    ),
    (
        {**ABC, "dependentSchemas": {"a": {"properties": {"b": {"minimum": 7}}}}},
        [{"b": 1}, {"a": 1}, {"a": 1, "b": 7}],
        [{"a": 1, "b": 6}],
    ),
    (
        {
            **ABC,
            "required": ["a"],
            "if": {"properties": {"a": {"const": 1}}},
            "then": {"required": ["b"]},
            "else": {"required": ["c"]},
        },
        [{"a": 1, "b": 2}, {"a": 2, "c": 2}],
        [{"a": 1}, {"a": 1, "c": 1}, {"a": 2, "b": 1}],
    ),
    ({"if": {"type": "string"}, "then": {"maxLength": 2}}, ["ab", 5, None], ["abc"]),
    ({"type": "integer", "if": {"minimum": 9}, "else": {"multipleOf": 2}}, [4, 11], [3]),
    ({"not": {"type": ["object", "array"]}}, ["x", 1, None], [{}, []]),
    ({"type": ["string", "null"], "not": {"const": "x"}}, ["", "y", "xx", None], ["x"]),
    ({"type": "string", "not": {"enum": ["ab", "a", "abc"]}}, ["", "abd", "b"], ["a", "ab", "abc"]),
    ({"type": "integer", "not": {"enum": [3, 5]}}, [2, 4, 6], [3, 5]),
    ({"type": "integer", "not": {"minimum": 3, "maximum": 6}}, [2, 7], [3, 6]),
    ({"type": "boolean", "not": {"const": True}}, [False], [True]),
    ({"not": {"enum": [[1], {"a": 1}]}}, [[], {}, [1, 2], {"a": 1, "b": 2}], [[1], {"a": 1}]),
    ({"not": {"enum": [[], {}]}}, [[1], {"a": 1}], [[], {}]),
    ({"type": "string", "not": {"pattern": "\\s"}}, ["ab", ""], ["a b", " "]),
    ({"type": "string", "not": {"pattern": "^[a-c]+$"}}, ["", "abd"], ["abc"]),
    ({"type": "string", "not": {"maxLength": 2}}, ["abc"], ["ab"]),
    ({**ABC, "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    (
        {**ABC, "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
        [{}, {"c": 1}],
        [{"a": 1}, {"b": 1}],
    ),
    ({**ABC, "not": {"properties": {"a": {"minimum": 3}}}}, [{"a": 2}], [{}, {"a": 3}]),
    ({"not": {"not": {"type": "string"}}}, ["x"], [1]),
    ({"type": "array", "not": {"items": {"type": "integer"}}}, [["x"], [1, "x"]], [[], [1, 2]]),
    ({"type": "array", "not": {"maxItems": 1}}, [[1, 2]], [[], [1]]),
    ({"type": "array", "not": {"contains": {"type": "null"}}}, [[], [1]], [[None], [1, None]]),
    ({"not": {"additionalProperties": False, "properties": {"a": {}}}}, [{"b": 1}], [{"a": 1}, {}]),
    (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
        [[], ["b", "a"], ["c", "a", "b"]],
        [["a", "a"], ["b", "c", "b"]],
    ),
    (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "uniqueItems": True},
        [[True], [False, True]],
        [[], [True, True]],
    ),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], ["x"]], [["x", "y"]]),
    (
        {"type": "array", "contains": {"type": "integer"}, "maxItems": 3},
        [[1], ["x", 1], ["x", "y", 1]],
        [[], ["x"], ["x", "y"]],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
        [{}, {"ab": 1}],
        [{"A": 1}, {"ab": 1, "B": 2}],
    ),
    (
        {**ABC, "propertyNames": {"enum": ["a", "x"]}},
        [{"a": 1}, {"x": "any"}],
        [{"b": 1}, {"y": 1}],
    ),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    ({**CLOSED, "minProperties": 2}, [{"a": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}], [{}, {"b": 1}]),
    ({**ABC, "minProperties": 1}, [{"b": 1}, {"z": 1}], [{}]),
    ({**CLOSED, "maxProperties": 1}, [{}, {"b": 1}], [{"a": 1, "b": 1}]),
    ({**ABC, "maxProperties": 2}, [{"a": 1, "z": 1}, {}], [{"a": 1, "b": 1, "z": 1}]),
    ({**ABC, "unevaluatedProperties": False}, [{"a": 1}], [{"z": 1}]),
    (
        {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree", "required": ["x"]},
        [{"x": 1}, {"sub": {"sub": {}}, "x": 1}],
        [{}, {"sub": {"x": "y"}, "x": 1}],
    ),
    (
        {"allOf": [ABC, {"required": ["b"]}, {"properties": {"b": {"maximum": 4}}}]},
        [{"b": 4}],
        [{}, {"b": 5}],
    ),
    (
        {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "properties": {"a": {}}},
        [{"a": 1, "xy": None}],
        [{"xy": 1}],
    ),
    (
        {"properties": {"p": {"$ref": "#/definitions/n"}}, "definitions": {"n": {"not": {}}}},
        [{"q": 1}],
        [{"p": 1}],
    ),
]


@pytest.fixture(scope="module")
def compiler():
    vocabulary = LLTokenizer(TokenizerWrapper(Bytes([])))
    compiler = GrammarCompiler(lambda: vocabulary)
    yield compiler
    compiler.close()


def allows(compiler, schema, value) -> bool:
    constraint = compiler.prepare(StructuredOutputs.of({"json": schema}))()
    text = list(json.dumps(value).encode())
    if len(constraint.valid(text)) < len(text):
        return False
    constraint.advance(text)
    return constraint.is_complete or Bytes.eos_token_id in allowed(constraint.masks(())[0])


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"), CASES, ids=lambda s: json.dumps(s)[:50]
)
def test_a_grammar_says_what_the_schema_says(compiler, schema, accepted, rejected):
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    if "dependencies" in schema:
        is_valid = jsonschema.Draft7Validator(schema).is_valid
    if schema.get("format") != "json-pointer":
        assert [is_valid(value) for value in (*accepted, *rejected)] == (
            [True] * len(accepted) + [False] * len(rejected)
        )
    assert [value for value in accepted if not allows(compiler, schema, value)] == []
    assert [value for value in rejected if allows(compiler, schema, value)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"type": "array", "contains": {}, "minContains": 2},
        {"type": "object", "propertyNames": {"not": {"const": "a"}}},
        {"allOf": [{}], "unevaluatedProperties": False},
        {"$dynamicRef": "#a"},
    ],
)
def test_what_cannot_be_enforced_is_refused_with_an_option_that_exists(compiler, schema):
    with pytest.raises(InvalidRequestError, match=re.escape(OPTION)):
        compiler.prepare(StructuredOutputs.of({"json": schema}))
    lenient = {**schema, "x-guidance": {"lenient": True}}
    compiler.prepare(StructuredOutputs.of({"json": lenient}))
    compiler.prepare(StructuredOutputs.of({"parts": [[{"json": lenient}]]}))


def chain(length):
    """Definitions each of which is two of the next, none of the other: twice the work for each."""
    twice = [
        {"oneOf": [{"not": {"$ref": f"#/$defs/d{n + 1}"}}, {"$ref": f"#/$defs/d{n + 1}"}]}
        for n in range(length)
    ]
    names = {f"d{n}": each for n, each in enumerate([*twice, {"minLength": 3}])}
    return {"$defs": names, "not": {"$ref": "#/$defs/d0"}}


@pytest.mark.parametrize(
    "schema",
    [
        chain(40),
        {"required": 5},
        {"type": [["string"]]},
        {"anyOf": {"type": "string"}},
        {"properties": [1]},
        {"$ref": "#/nowhere"},
        {"$ref": "other.json#/a"},
        {"not": {"$ref": "#"}},
        {
            "type": "object",
            "properties": {f"p{n}": {} for n in range(40)},
            "minProperties": 20,
        },
    ],
    ids=lambda s: json.dumps(s)[:40],
)
def test_a_hostile_schema_is_refused_with_a_sentence(compiler, schema):
    with pytest.raises(InvalidRequestError):
        compiler.prepare(StructuredOutputs.of({"json": schema}))
