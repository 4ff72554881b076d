"""Counting over the last minute."""

from ridgeline.server.keys import Caller
from ridgeline.server.limits import Limits, SlidingCount


def test_a_count_holds_one_minute_and_no_more():
    now = 0.0
    count = SlidingCount(lambda: now)
    for second in range(500):
        now = float(second)
        count.add(2)
        assert len(count._seconds) <= 60
    assert count.total() == 120
    now += 60
    assert count.total() == 0


def test_a_key_without_limits_leaves_nothing_behind_in_a_day():
    now = 0.0
    limits = Limits(1, clock=lambda: now)
    caller = Caller(tenant="local")
    for second in range(0, 86400, 7):
        now = float(second)
        with limits.admitted(caller):
            limits.charge_input(caller, 100)
    tenant = limits._tenants["local"]
    assert max(len(tenant.requests._seconds), len(tenant.inputs._seconds)) <= 60
