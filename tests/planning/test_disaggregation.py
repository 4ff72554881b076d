"""Instances for prefill and decode."""

import doctest

import pytest
from tests.planning.questions import question

from ridgeline.core.errors import InvalidRequestError
from ridgeline.planning import Slo, disaggregation
from ridgeline.planning.disaggregation import disaggregate, instances


def test_worked_examples():
    assert doctest.testmod(disaggregation).failed == 0


def asked(prompt, output, ttft, tpot):
    slo = Slo(ttft_s=ttft, tpot_s=tpot)
    lengths = {"prompt_tokens": prompt, "output_tokens": output, "num_requests": None}
    return question("llama-3.1-8b", "h100", slo=slo, **lengths)


def test_long_prompts_want_more_prefill_and_short_ones_as_much_decode():
    """The published 2:1 to 4:1, and 1:2 to 1:1 (docs/planning.md)."""
    prefill, decode = disaggregate(asked(4000, 200, 0.5, 0.05)).ratio
    assert 2 <= prefill / decode <= 4
    prefill, decode = disaggregate(asked(500, 200, 1.0, 0.015)).ratio
    assert 1 / 2 <= prefill / decode <= 1


def test_a_load_takes_whole_instances():
    assert [instances(8, 2), instances(8, 6), instances(0.1, 6)] == [4, 2, 1]


def test_both_limits_are_needed_and_a_lone_request_must_meet_them():
    for ttft, tpot in ((None, 0.1), (1.0, None), (1e-4, 0.1), (1.0, 1e-5)):
        with pytest.raises(InvalidRequestError):
            disaggregate(asked(500, 50, ttft, tpot))
