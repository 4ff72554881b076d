import numpy as np

from ridgeline.core.rounding import ceil_div, round_up


def test_what_is_left_over_takes_a_block_of_its_own():
    assert [ceil_div(count, 4) for count in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert ceil_div(np.array([0, 1, 4, 5]), 4).tolist() == [0, 1, 1, 2]


def test_a_multiple_is_itself_and_anything_else_the_next():
    assert [round_up(count, 4) for count in (0, 1, 4, 5)] == [0, 4, 4, 8]
