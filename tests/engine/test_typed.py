from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Literal

import msgspec
import pytest

import ridgeline
from ridgeline import SamplingParams
from ridgeline.core.errors import InvalidRequestError


class Colour(Enum):
    RED = "red"
    GREEN = "green"


@dataclass
class Point:
    x: int
    y: bool | None


class Order(msgspec.Struct):
    colour: Colour
    points: list[Point]
    count: Literal[1, 2]


def params(llm, seed, **changes):
    """Settings that push a random model to close what it has opened."""
    closing = ("<eos>", "}", "]", '"', "0")
    bias = {llm.tokenizer.token_to_id(text): 30.0 for text in closing}
    settings = {"seed": seed, "max_tokens": 200, "temperature": 1.0, "logit_bias": bias}
    return SamplingParams(**(settings | changes))


@pytest.mark.parametrize(
    "wanted",
    [
        int, bool, Colour, Point, date, Literal["a", "bc"], bytes, Decimal, set[bool],
        Annotated[datetime, msgspec.Meta(tz=True)], Annotated[time, msgspec.Meta(tz=True)],
    ],
    ids=str,
)  # fmt: skip
def test_values_are_of_the_type(llm, wanted):
    decoder = msgspec.json.Decoder(wanted)
    for seed in range(3):
        value = ridgeline.format(llm, wanted, params(llm, seed))("the cat")
        assert decoder.decode(msgspec.json.encode(value)) == value


def test_structs_nest(llm):
    value = ridgeline.format(llm, Order, params(llm, 1))("the mat")
    assert isinstance(value, Order)
    assert all(isinstance(point, Point) for point in value.points)


def test_several_prompts(llm):
    values = ridgeline.format(llm, Literal["yes", "no"], params(llm, 0)).each(["the cat", "a mat"])
    assert set(values) <= {"yes", "no"}
    assert len(values) == 2


def test_an_output_that_was_cut_is_an_error(llm):
    with pytest.raises(InvalidRequestError, match="raise max_tokens"):
        ridgeline.format(llm, Order, params(llm, 0, max_tokens=3))("the cat")


def test_an_output_that_is_no_value_is_an_error(llm):
    params = SamplingParams(
        max_tokens=100, temperature=0.0, stop="P", include_stop_str_in_output=True
    )
    with pytest.raises(InvalidRequestError, match="no such value"):
        ridgeline.format(llm, timedelta, params)("the cat")


def test_types_that_cannot_be_described(llm):
    with pytest.raises(InvalidRequestError, match="cannot be described"):
        ridgeline.format(llm, type(llm))


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (datetime, "tz=True"),
        (list[time], "tz=True"),
        (Annotated[datetime, msgspec.Meta(description="when")], "tz=True"),
        (dict[int, str], "must be str"),
    ],
    ids=str,
)
def test_types_whose_schema_lets_other_texts_through(llm, wanted, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        ridgeline.format(llm, wanted)
