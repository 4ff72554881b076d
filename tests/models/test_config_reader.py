"""`ConfigReader`: types, bounds, absence, and what nobody asked for."""

import math

import pytest

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.models import ConfigReader


def reader(**values):
    return ConfigReader(values)


def test_values_and_defaults():
    config = reader(n=3, x=2, flag=True, name="a", names=["a", "b"], null=None)
    assert config.integer("n") == 3
    assert config.number("x", minimum=0.0) == 2.0
    assert isinstance(config.number("x", minimum=0.0), float)
    assert config.boolean("flag", default=False) is True
    assert config.text("name") == "a"
    assert config.texts("names") == ("a", "b")
    assert config.integer("absent", default=7) == config.integer("null", default=7) == 7
    assert config.texts("absent") is None


def test_null_of_optional_values():
    config = reader(null=None, n=4)
    assert config.optional_integer("null", default=9) is None
    assert config.optional_integer("absent", default=9) == 9
    assert config.optional_integer("n", default=9) == 4
    assert config.optional_number("null", minimum=0.0, default=9.0) is None
    assert config.optional_number("absent", minimum=0.0, default=9.0) == 9.0


@pytest.mark.parametrize(
    "value", [0, -1, 2**31, 10**400, 1.0, 1.5, True, "1", [1], {}, math.nan, math.inf], ids=str
)
def test_wrong_integer(value):
    with pytest.raises(CorruptFileError, match="size") as caught:
        reader(size=value).integer("size")
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [-1, 10**400, math.nan, math.inf, False, "1", None, []], ids=str)
def test_wrong_number(value):
    with pytest.raises(CorruptFileError, match="eps"):
        reader(eps=value).number("eps", minimum=0.0)


def test_wrong_boolean_text_texts_section():
    config = reader(value=1)
    for read in (
        lambda: config.boolean("value", default=True),
        lambda: config.text("value"),
        lambda: config.texts("value"),
        lambda: config.section("value"),
        lambda: reader(value=["a", 1]).texts("value"),
    ):
        with pytest.raises(CorruptFileError, match="value"):
            read()


def test_refuse():
    config = reader(plain=False, odd={"deep": [[[]]]}, null=None)
    config.refuse("plain", unless=(False,))
    config.refuse("null")
    config.refuse("absent")
    with pytest.raises(UnsupportedModelError, match="odd"):
        config.refuse("odd")
    assert config.leftovers() == []


def test_leftovers_are_what_was_never_read():
    config = reader(a=1, b=2, null=None, inner={"c": 3, "d": 4}, unread={"e": 5})
    config.integer("a")
    config.section("inner").integer("c")
    assert config.leftovers() == ["b", "inner.d", "unread"]


def test_errors_name_nested_keys_and_never_show_whole_values():
    deep = current = {}
    for _ in range(50_000):
        current["x"] = current = {}
    with pytest.raises(CorruptFileError, match=r"rope\.factor") as caught:
        reader(rope={"factor": deep}).section("rope").number("factor", minimum=0.0)
    assert "an object" in str(caught.value)
    with pytest.raises(CorruptFileError) as caught:
        reader(name="x" * 10_000).integer("name")
    assert len(str(caught.value)) < 200
