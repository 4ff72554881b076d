"""Objects of formats and tools have no keys but those that their schema names."""

import json

import pytest
from jsonschema import Draft202012Validator
from tests.server.running import running

from ridgeline.server.closed_objects import closed

NAME = {"type": "string", "maxLength": 6}
POINT = {"type": "object", "properties": {"x": NAME, "y": NAME}}


def test_objects_are_closed_wherever_they_stand():
    schema = {
        "properties": {"a": POINT, "b": {"type": "array", "items": POINT}},
        "$defs": {"p": POINT},
        "anyOf": [POINT, {"type": "null"}],
    }
    found = closed(schema)
    places = [found["properties"]["a"], found["properties"]["b"]["items"], found["$defs"]["p"]]
    assert all(place["additionalProperties"] is False for place in (*places, found["anyOf"][0]))
    assert "additionalProperties" not in POINT


@pytest.mark.parametrize(
    "schema",
    [
        POINT | {"additionalProperties": True},
        POINT | {"additionalProperties": NAME},
        POINT | {"patternProperties": {"^z": NAME}},
        POINT | {"required": ["z"]},
        POINT | {"allOf": [{"properties": {"z": NAME}}]},
        {"allOf": [POINT, {"properties": {"z": NAME}}]},
        {"type": "object"},
        {"type": "object", "additionalProperties": NAME},
        True,
    ],
)
def test_what_says_otherwise_or_would_fit_nothing_stays(schema):
    assert closed(schema) == schema


def test_what_the_closed_schema_takes_the_open_one_takes():
    value = {"a": {"x": "1"}, "b": [{"y": "2"}]}
    schema = {"properties": {"a": POINT, "b": {"type": "array", "items": POINT}}}
    Draft202012Validator(schema).validate(value)
    Draft202012Validator(closed(schema)).validate(value)
    assert list(Draft202012Validator(closed(schema)).iter_errors({"a": {"z": 1}}))


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    with running(None, data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


def objects(embedded, schema, *, count, seed=5):
    """Finished objects, of ``count`` samples."""
    body = {
        "messages": [{"role": "user", "content": "Describe a class as JSON."}],
        "max_tokens": 90, "temperature": 1.5, "n": count, "seed": seed,
        "response_format": {"type": "json_object", "schema": schema},
    }  # fmt: skip
    with embedded.client() as client:
        answer = client.post("/v1/chat/completions", json=body, timeout=900).json()
    return [
        json.loads(choice["message"]["content"])
        for choice in answer["choices"]
        if choice["finish_reason"] == "stop"
    ]


def test_no_finished_object_has_an_invented_key(embedded):
    person = {"type": "object", "properties": {"name": NAME, "home": POINT}, "required": ["name"]}
    found = objects(embedded, person, count=32)
    assert len(found) >= 25
    assert all(set(each) <= {"name", "home"} for each in found)
    assert all(set(each.get("home", {})) <= {"x", "y"} for each in found)


NESTED = (
    {"type": "object", "properties": {"name": NAME, "home": POINT}, "required": ["name"]},
    {
        "type": "object",
        "properties": {"points": {"type": "array", "items": POINT, "maxItems": 2}},
        "required": ["points"],
    },
    {
        "type": "object",
        "properties": {
            "at": {"anyOf": [POINT, {"$ref": "#/$defs/pair"}]},
            "n": {"type": "integer"},
        },
        "required": ["at"],
        "$defs": {"pair": {"type": "object", "properties": {"a": POINT, "b": POINT}}},
    },
)


@pytest.mark.slow
def test_of_500_finished_objects_none_has_an_invented_key(embedded, counted):
    known = {"name", "home", "points", "at", "n", "a", "b", "x", "y"}

    def keys(value):
        if isinstance(value, list):
            return set().union(*map(keys, value))
        if not isinstance(value, dict):
            return set()
        return set(value).union(*map(keys, value.values()))

    found = []
    for seed in range(24):
        schema = NESTED[seed % len(NESTED)]
        objects_of_seed = objects(embedded, schema, count=64, seed=seed)
        for each in objects_of_seed:
            Draft202012Validator(closed(schema)).validate(each)
            assert keys(each) <= known
        found += objects_of_seed
        if len(found) >= 500:
            break
    assert len(found) >= 500
    counted(len(found))


def test_an_open_one_may_have_them(embedded):
    """So the test above can fail."""
    person = {"type": "object", "properties": {"name": NAME}, "additionalProperties": NAME}
    found = objects(embedded, person, count=16)
    assert any(set(each) - {"name"} for each in found)
