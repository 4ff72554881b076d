"""How uneven the load of experts is."""

import numpy as np
import pytest

from ridgeline.core.expert_load import expert_load

EVEN = np.full(4, 10)
SKEWED = np.array([0, 0, 10, 30])


def test_an_even_load_has_no_skew():
    load = expert_load({"a": EVEN, "b": EVEN}, 2)
    assert (load.routed_tokens, load.skew, load.worst_skew, load.rank_skew) == (80, 1.0, 1.0, 1.0)


def test_the_skew_is_that_of_what_all_layers_wait_for():
    """Layer after layer the most loaded expert is waited for: 10 and 30 for 10 and 10."""
    load = expert_load({"a": EVEN, "b": SKEWED}, 2)
    assert load.skew == pytest.approx(40 / 20)
    assert (load.worst_router, load.worst_skew) == ("b", 3.0)
    assert load.rank_skew == pytest.approx((20 + 40) / (20 + 20))


def test_nothing_is_said_of_experts_that_saw_no_token():
    assert expert_load({}) is None
    assert expert_load({"a": np.zeros(4, dtype=int)}) is None
