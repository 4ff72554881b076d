"""Counting over the last minute."""

import pytest

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


HI = [{"role": "user", "content": "the cat"}]
WORK = {
    "/v1/completions": {"prompt": "the cat", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/v1/responses": {"input": "the cat", "max_output_tokens": 1},
    "/v1/messages": {"messages": HI, "max_tokens": 1},
    "/v1/embeddings": {"input": "the cat"},
}


@pytest.mark.parametrize("path", WORK)
def test_who_is_over_a_limit_costs_no_work(http, served, monkeypatch, path):
    """Prompts are not rendered or tokenized; and a place that was given is given back."""
    limits = Limits(1)
    monkeypatch.setattr(served.server, "limits", limits)
    assert http.post(path, json=WORK[path]).status_code == 200
    with limits.admitted(Caller(tenant="other")):
        for module in ("answers", "routes.completions", "routes.plain"):
            monkeypatch.setattr(f"ridgeline.server.{module}.tokenize", None)
        monkeypatch.setattr("ridgeline.server.answers.render", None)
        refused = http.post(path, json=WORK[path])
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
    assert http.post(path, json=WORK[path]).status_code == 500
    assert limits.running == 0
