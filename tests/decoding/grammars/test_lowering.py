"""Lowered schemas by themselves: `jsonschema` says of them what it says of the schemas they are of,
and they have no keyword that llguidance lacks."""

import itertools
import re
from functools import partial

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.decoding.grammars.test_lowered_schemas import ABC, CASES

from ridgeline.decoding.grammars.patterns import (
    literals_pattern,
    matches_name,
    pattern_without,
    rejected_pattern,
)
from ridgeline.decoding.grammars.schema_document import SchemaDocument
from ridgeline.decoding.grammars.schemas import lowered_schema

LOWERED = {"not", "if", "then", "else", "oneOf", "contains", "uniqueItems", "propertyNames"}
LOWERED |= {"dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"}
NAMES = ("a", "b", "c", "z")
ITEMS = (None, True, False, 1, 2, 5, "", "a", "ab", "abc", [], {})
LISTS = [list(each) for n in range(4) for each in itertools.product((1, "a", None), repeat=n)]
OBJECTS = [
    dict.fromkeys(names, value)
    for count in range(len(NAMES) + 1)
    for names in itertools.combinations(NAMES, count)
    for value in (1, "a")
]
VALUES = [*ITEMS, *LISTS, *OBJECTS, [True, False], ["ab"], ["a", "ab"], {"a": 1, "b": "a"}]


def is_valid_by(schema):
    return jsonschema.Draft202012Validator(schema).is_valid


def keywords_of(schema):
    """Of a lowered schema; names of properties and definitions are none."""
    if isinstance(schema, list):
        return set().union(*map(keywords_of, schema))
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "$defs"):
            found |= keywords_of(list(value.values()))
        elif keyword not in ("enum", "const"):
            found |= keywords_of(value)
    return found


def test_a_lowered_schema_allows_what_the_schema_allows():
    for schema, accepted, rejected in CASES:
        lowered = lowered_schema(schema)
        is_valid = is_valid_by(lowered)
        assert [value for value in accepted if not is_valid(value)] == [], schema
        assert [value for value in rejected if is_valid(value)] == [], schema
        assert not keywords_of(lowered) & LOWERED, schema


LEAVES = st.sampled_from(
    [
        *({"type": each} for each in ("string", "integer", "boolean", "null", "array", "object")),
        {"type": ["string", "null"]},
        {"const": "a"}, {"const": None}, {"enum": [1, "a", True]}, {"enum": ["a", "ab", []]},
        {"enum": [False, [1], {"a": 1}]}, {"minimum": 2}, {"maximum": 1}, {"exclusiveMinimum": 1},
        {"minLength": 2}, {"maxLength": 1}, {"pattern": "^a"}, {"minItems": 2}, {"maxItems": 1},
        {"minProperties": 2}, {"maxProperties": 1}, {"required": ["a"]}, {"required": ["a", "b"]},
        {"uniqueItems": True, "items": {"enum": [1, "a", None]}},
        {"uniqueItems": True, "items": {"enum": [1, "a"]}, "minItems": 1, "maxItems": 2},
        True, False, {},
    ]
)  # fmt: skip


def compound(inner):
    pairs = st.lists(inner, min_size=1, max_size=2)
    of_names = st.dictionaries(st.sampled_from(NAMES[:3]), inner, max_size=3)
    lists = st.lists(st.sampled_from(NAMES[:3]), max_size=2, unique=True)
    needed = st.dictionaries(st.sampled_from(NAMES[:3]), lists, max_size=2)
    return st.one_of(
        st.builds(lambda key, each: {key: each}, st.sampled_from(["anyOf", "allOf"]), pairs),
        st.fixed_dictionaries({"oneOf": pairs}),
        st.fixed_dictionaries({"not": inner}),
        st.fixed_dictionaries({"if": inner}, optional={"then": inner, "else": inner}),
        st.fixed_dictionaries({"properties": of_names}, optional={"required": lists}),
        st.fixed_dictionaries({"dependentSchemas": of_names}),
        st.fixed_dictionaries({"dependentRequired": needed}),
        st.fixed_dictionaries({"items": inner}),
        st.fixed_dictionaries({"prefixItems": pairs}, optional={"items": inner}),
        st.fixed_dictionaries({"contains": inner}),
    )


@given(st.recursive(LEAVES, compound, max_leaves=5))
@settings(max_examples=100, deadline=None)
def test_no_lowered_schema_allows_what_the_schema_refuses(schema):
    lowered = lowered_schema(schema)
    is_valid, is_allowed = is_valid_by(schema), is_valid_by(lowered)
    assert [each for each in VALUES if is_allowed(each) and not is_valid(each)] == []
    assert not keywords_of(lowered) & LOWERED


COUNTS = st.none() | st.integers(0, 4)


@given(
    st.sets(st.sampled_from(NAMES[:3]), min_size=1),
    st.lists(st.sampled_from(NAMES), max_size=3, unique=True),
    COUNTS,
    COUNTS,
    st.sampled_from([None, False, True]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_numbers_of_properties_are_those_of_the_schema(
    names, required, least, most, additional, has_pattern
):
    limits = {
        "minProperties": least,
        "maxProperties": most,
        "additionalProperties": additional,
        "patternProperties": {"^z": {"type": "integer"}} if has_pattern else None,
    }
    properties = {name: {"type": "integer"} for name in sorted(names)}
    schema = {"properties": properties, "required": required}
    schema |= {name: value for name, value in limits.items() if value is not None}
    is_valid, is_allowed = is_valid_by(schema), is_valid_by(lowered_schema(schema))
    assert [each for each in VALUES if is_allowed(each) != is_valid(each)] == []


def test_optional_properties_are_not_left_to_llguidance_to_count():
    closed = {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False}
    for bound in ({"minProperties": 1}, {"maxProperties": 1}):
        assert not keywords_of(lowered_schema(closed | bound)) & bound.keys()
        needed = closed | bound | {"required": ["a", "b"]}
        assert bound.keys() <= keywords_of(lowered_schema(needed))


def test_schemas_are_disjoint_where_no_value_has_the_types_or_the_values_of_both():
    disjoint = partial(SchemaDocument({}).disjoint, context=True)
    assert disjoint({"type": "string"}, {"type": "integer"})
    assert disjoint({"type": "string"}, {"enum": [1, 2]})
    assert disjoint({"enum": [1, 2]}, {"enum": [3]})
    assert not disjoint({"type": "number"}, {"type": "integer"})
    assert not disjoint({"enum": [1, 2]}, {"enum": [2, 3]})
    assert not disjoint({"type": "string"}, True)
    assert disjoint({"allOf": [{"type": "string"}]}, {"type": "integer"})


def test_objects_are_disjoint_where_what_one_requires_the_other_refuses():
    disjoint = partial(SchemaDocument({}).disjoint, context=True)
    needs = {"type": "object", "required": ["a"]}
    closed = {"type": "object", "additionalProperties": False}
    assert disjoint(needs, closed)
    assert disjoint(needs | {"properties": {"a": {"type": "null"}}}, closed | ABC)
    assert not disjoint(needs | {"properties": {"a": {"type": "integer"}}}, closed | ABC)
    assert not disjoint(needs, closed | {"patternProperties": {"^a": {}}})
    assert not disjoint(needs, {"type": "object"})


def test_a_reference_leads_to_a_schema_or_is_refused():
    """RFC 6901: ``~1`` stands for a slash, ``~0`` for a tilde."""
    first, second = {"$anchor": "first"}, {"$id": "https://example.com/second"}
    root = {"$defs": {"a/b": first, "~": [True, second]}, "title": "text"}
    target = SchemaDocument(root).target
    assert target("#") is root
    assert target("#/$defs/a~1b") is target("#first") is first
    assert target("#/$defs/~0/1") is target("https://example.com/second") is second
    assert target("#/$defs/%7E0/0") is True
    for nowhere in (
        "#/$defs/c",
        "#/$defs/~0/2",
        "#/$defs/~0",
        "#second",
        "#/title",
        "other#/$defs",
    ):
        with pytest.raises(ValueError, match="leads to nothing"):
            target(nowhere)


@pytest.mark.parametrize("wanted", [{}, {"type": "string"}, {"description": "x"}, {"format": "x"}])
def test_names_of_which_nothing_is_wanted_are_any(wanted):
    assert lowered_schema({"propertyNames": wanted}) == {}


@pytest.mark.parametrize("bound", [("minimum", 2**63), ("exclusiveMaximum", -(2**63))])
def test_bounds_beyond_64_bits_are_refused_for_integers_alone(bound):
    name, value = bound
    for kinds in ("integer", ["null", "integer"]):
        with pytest.raises(ValueError, match=f"{name} is beyond integers of 64 bits"):
            lowered_schema({"type": kinds, name: value})
    nearer = value + (-1 if value > 0 else 1)
    for kinds, within in (("number", value), (["string"], value), ("integer", nearer)):
        schema = {"type": kinds, name: within}
        assert lowered_schema(schema) == schema


def test_a_pattern_is_looked_for_in_a_name_where_that_is_quick():
    assert matches_name("^a[0-9]+$", "a12") and matches_name("b", "abc")
    assert matches_name("^a[0-9]+$", "b12") is False
    assert matches_name("^(a|b)c$", "bc") is True
    assert matches_name("(a+)+$", "a") is None  # takes long where the name does not match
    assert matches_name("a+$", "a" * 300) is None
    assert matches_name("[", "a") is None


TEXTS = st.text('ab.^-]\\\n"é', max_size=4)


@given(st.lists(TEXTS, min_size=1, max_size=4), st.lists(TEXTS, max_size=8))
@settings(max_examples=100, deadline=None)
def test_patterns_of_texts_match_these_or_all_others(texts, others):
    for text in texts + others:
        is_listed, starts = text in texts, text.startswith(tuple(texts))
        assert bool(re.fullmatch(literals_pattern(texts), text)) is is_listed
        assert bool(re.fullmatch(pattern_without(texts), text)) is not is_listed
        prefixes = pattern_without(texts, as_prefixes=True)
        assert bool(re.fullmatch(prefixes, text)) is not starts


@pytest.mark.parametrize(
    "pattern", ["^a-b", "^ab$", "^", "[ab]", "^[^a]+$", "^[ab]*$", "\\s", "\\W+", "^\\w+$"]
)
def test_what_a_pattern_rejects_is_what_is_not_found_by_it(pattern):
    texts = map("".join, itertools.product("ab- ", repeat=3))
    for text in ("", "a", "b", "ab", "a-b", *texts):
        is_rejected = re.fullmatch(rejected_pattern(pattern), text) is not None
        assert is_rejected is (re.search(pattern, text) is None), text
