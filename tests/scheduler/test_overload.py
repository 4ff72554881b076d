"""How long those who are turned away are told to stay away."""

import pytest

from ridgeline.scheduler.overload import DrainRate


def test_who_waits_longer_than_others_is_told_their_intervals_within_a_second_and_a_minute():
    rate = DrainRate()
    assert rate.wait_s(100) == 1.0  # nothing is known
    for now_s in (10.0, 12.0, 14.0):
        rate.note_admission(now_s)
    assert [rate.wait_s(count) for count in (0, 3, 30, 31)] == [1.0, 6.0, 60.0, 60.0]
    rate.note_start()  # nobody waited until now
    rate.note_admission(500.0)
    assert rate.wait_s(3) == 6.0
    rate.note_admission(504.0)
    assert rate.wait_s(3) == pytest.approx(3 * (0.95 * 2 + 0.05 * 4))
