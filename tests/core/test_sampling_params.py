import math

import pytest

from ridgeline import SamplingParams
from ridgeline.core.errors import InvalidRequestError

BAD = [
    ("n", 0), ("n", 129), ("n", 1.5), ("n", True), ("n", "1"),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", "hot"), ("temperature", 101),
    ("top_k", -2), ("top_k", 2**31), ("top_p", 0.0), ("top_p", 1.1), ("top_p", -1),
    ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0.0), ("repetition_penalty", -1),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", math.nan),
    ("seed", -1), ("seed", 2**64), ("max_tokens", 0), ("max_tokens", 2**31), ("min_tokens", -1),
    ("logprobs", -1), ("logprobs", 129), ("prompt_logprobs", 2**64),
    ("stop", [""]), ("stop", ["x" * 1025]), ("stop", ["x"] * 65), ("stop", [1]),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("logit_bias", {1: 101.0}),
    ("logit_bias", {-1: 1.0}), ("logit_bias", {"a": 1.0}), ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: 10**400}),
    ("logit_bias", dict.fromkeys(range(4097), 1.0)), ("logit_bias", [1]),
    ("ignore_eos", 1), ("skip_special_tokens", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: str(value)[:20])
def test_out_of_bounds_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=name.split("_token")[0]):
        SamplingParams(**{name: value})


def test_unknown_setting_is_refused():
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)


def test_contradiction_is_refused():
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidRequestError, match="segment_reuse is of segments"):
        SamplingParams(segment_reuse=16)


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="\n").stop == ("\n",)


def test_extremes_are_accepted():
    SamplingParams(
        n=128, temperature=100.0, top_k=2**31 - 1, top_p=1e-9, min_p=1.0, seed=2**64 - 1,
        presence_penalty=-2, frequency_penalty=2.0, logprobs=0, prompt_logprobs=128,
    )  # fmt: skip
