"""What a server tells of its traffic, and alarms where that changes."""

import random
from types import SimpleNamespace

import pytest
from tests.server.running import running

from ridgeline.server.traffic import TrafficSketch

DAY_S = 86_400


def requests(seed, seconds, rate, scale=1.0, start=0.0):
    """Poisson arrivals with lognormal lengths."""
    rng, at_s = random.Random(seed), start
    while at_s < start + seconds:
        at_s += rng.expovariate(rate)
        prompt = max(1, int(rng.lognormvariate(5.3, 0.8) * scale))
        yield SimpleNamespace(
            arrival_s=at_s,
            prompt_tokens=prompt,
            cached_tokens=prompt // 2 if rng.random() < 0.4 else 0,
            output_tokens=max(1, int(rng.lognormvariate(4.5, 0.7))),
        )


@pytest.mark.parametrize("seed", range(3))
def test_prompts_twice_as_long_are_alarmed_within_half_an_hour(seed):
    now = 0.0
    traffic = TrafficSketch(clock=lambda: now)
    steady = list(requests(seed, DAY_S, 0.5))
    for call in [*steady, *requests(seed + 9, 1800, 0.5, scale=2.0, start=DAY_S)]:
        now = call.arrival_s
        traffic.note(call)
    (alarm,) = traffic.alarms  # none in the day before
    assert alarm.quantity == "prompt_tokens"
    assert DAY_S < alarm.at_s < DAY_S + 1800
    assert alarm.since / alarm.before == pytest.approx(2.0, rel=0.25)


def test_hits_and_rates_that_change_are_told_apart():
    traffic = TrafficSketch()
    for call in requests(0, 2000, 1.0):
        traffic.note(call)
    for call in requests(1, 2000, 4.0, start=2000.0):
        call.cached_tokens = 0
        traffic.note(call)
    assert {alarm.quantity for alarm in traffic.alarms} == {"arrival_gap_s", "cached_share"}
    assert traffic.num_alarms["cached_share"] == 1


def test_predictions_that_go_wrong_are_alarmed():
    now = 0.0
    traffic = TrafficSketch(clock=lambda: now)
    for minute in range(60):
        for quarter in range(4):
            now = 60 * minute + 15 * quarter + 15
            figures = SimpleNamespace(bias=1.5 if minute >= 30 else 1.0)
            traffic.look(SimpleNamespace(prefill=SimpleNamespace(bias=None), decode=figures))
    (alarm,) = traffic.alarms
    assert alarm.quantity == "decode_measured_over_predicted"
    assert 30 < alarm.at_s / 60 < 40


def test_a_server_tells_lengths_and_no_text(roomy_folder, tmp_path):
    with running(roomy_folder, data_dir=tmp_path, api_key=("k",), admin_api_key="a") as server:
        with server.client(headers={"authorization": "Bearer k"}) as client:
            for _ in range(2):
                body = {"prompt": "the cat sat", "max_tokens": 3, "ignore_eos": True}
                assert client.post("/v1/completions", json=body).status_code == 200
            assert client.get("/admin/traffic").status_code == 403
        with server.client(headers={"authorization": "Bearer a"}) as client:
            told = client.get("/admin/traffic").json()
            metrics = client.get("/metrics").text
    assert [set(each) for each in told["requests"]] == 2 * [
        {"at_s", "prompt_tokens", "output_tokens", "cached_tokens"}
    ]
    assert [each["output_tokens"] for each in told["requests"]] == [3, 3]
    assert told["alarms"] == []
    assert 'ridgeline:drift_alarms_total{model_name="' in metrics
