"""The published worked examples of money, as doctests."""

import doctest

import pytest

from ridgeline.planning import cost, placement


@pytest.mark.parametrize("module", [cost, placement])
def test_worked_examples(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0
