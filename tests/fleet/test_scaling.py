"""How many replicas are wanted: forecasts, a simulation from now, and decisions that hold."""

import random
from collections import Counter

import pytest
from benchmarks.autoscaling import Ours, a_day, machine_of, run
from tests.fleet.test_simulation import MACHINE

from ridgeline.core.errors import SettingsError
from ridgeline.fleet.forecast import ArrivalForecast, ExpectedLoad
from ridgeline.fleet.light_simulation import ReplicaLoad, attainment
from ridgeline.fleet.policies import POLICIES, EngineLoad
from ridgeline.fleet.scaling import ScalingGoal, ScalingPolicy
from ridgeline.fleet.simulation import simulate_fleet
from ridgeline.planning import Slo, poisson

LIMITS = Slo(ttft_s=0.5, tpot_s=0.03)
LENGTHS = [(900, 60)]
START_S = 20.0


def replica(*, num_pending=0, starts_in_s=0.0):
    linear = MACHINE.linear
    load = EngineLoad(
        linear=linear, pass_s=linear.pass_s, max_seqs=16,
        num_pending=num_pending, pending_tokens=900 * num_pending,
    )  # fmt: skip
    kv_tokens = MACHINE.settings.num_blocks[0] * MACHINE.settings.block_tokens
    return ReplicaLoad(load=load, curve=MACHINE.curve, kv_tokens=kv_tokens, starts_in_s=starts_in_s)


def expected(p50_rps, burst_rps=None):
    return ExpectedLoad(p50_rps=p50_rps, burst_rps=burst_rps or p50_rps, lengths=LENGTHS)


def policy(**goal):
    return ScalingPolicy(ScalingGoal(slo=LIMITS, **{"max_replicas": 8} | goal), start_s=START_S)


@pytest.mark.parametrize("rate_rps", [20, 30, 34, 45])
def test_the_light_simulation_says_what_the_scheduler_does(rate_rps):
    arrivals = poisson(rate_rps=rate_rps, num_requests=300, prompt_tokens=900, output_tokens=60)
    traffic = simulate_fleet(MACHINE, arrivals, POLICIES["least-seconds"](), count=1).traffic
    seconds = arrivals[-1].arrival_s
    light = attainment([replica()], 300 / seconds, LENGTHS, LIMITS, from_s=0.0, until_s=seconds)

    assert light == pytest.approx(traffic.attainment(LIMITS), abs=0.12)


def test_what_waits_and_what_starts_count():
    rate = {"rate_rps": 20.0, "lengths": LENGTHS, "slo": LIMITS, "from_s": 0.0, "until_s": 20.0}
    free = attainment([replica()], **rate)
    assert free > attainment([replica(num_pending=100)], **rate) + 0.1
    both = [replica(num_pending=100), replica(starts_in_s=5.0)]
    assert free > attainment(both, **rate) > attainment([replica(num_pending=100)], **rate)


def test_a_forecast_follows_level_trend_and_bursts():
    draw, forecast, now_s = random.Random(0), ArrivalForecast(0.0, ahead_s=40.0), 0.0
    while now_s < 600:
        now_s += draw.expovariate(5.0)
        forecast.note(now_s, 100, 10)
    steady = forecast.expected(600.0)
    assert steady.p50_rps == pytest.approx(5.0, rel=0.15)
    assert steady.p50_rps < steady.burst_rps < 7.0
    while now_s < 620:
        now_s += draw.expovariate(20.0)
        forecast.note(now_s, 100, 10)
    burst = forecast.expected(620.0)
    assert burst.p50_rps > 15  # within three intervals
    while now_s < 900:
        now_s += draw.expovariate(5.0)
        forecast.note(now_s, 100, 10)
    after = forecast.expected(900.0)
    assert after.p50_rps < 7
    assert after.burst_rps > 2 * after.p50_rps  # it may come again, with a tenth of all requests


def test_a_forecast_looks_ahead_of_a_ramp():
    forecast = ArrivalForecast(0.0, ahead_s=60.0)
    for second in range(600):  # from 1 to 6 a second
        for _ in range(round(1 + second / 120)):
            forecast.note(float(second), 100, 10)
    now = 1 + 600 / 120
    assert now < forecast.expected(600.0).p50_rps < now + 1


def test_a_forecast_looks_as_far_as_a_start_takes_by_now():
    forecasts = [ArrivalForecast(0.0, ahead_s=20.0) for _ in range(2)]
    for second in range(600):
        for _ in range(round(1 + second / 120)):
            for each in forecasts:
                each.note(float(second), 100, 10)
    forecasts[1].look_ahead(120.0)
    near, far = (each.expected(600.0).p50_rps for each in forecasts)
    assert far > near  # on a ramp
    for each in forecasts:
        each.look_ahead(20.0)
    assert forecasts[0].expected(600.0) == forecasts[1].expected(600.0)


def test_the_fleet_grows_to_the_fewest_that_keep_the_limits():
    decision = policy().decide(0.0, [replica()], expected(80.0))
    fewest = decision.wanted
    assert fewest > 2
    assert decision.if_few[fewest] >= 0.95 > decision.if_few[fewest - 1]
    started = [replica(), *[replica(starts_in_s=START_S)] * (fewest - 1)]
    assert policy().decide(0.0, started, expected(80.0)).wanted == fewest  # not once more
    assert policy(max_replicas=2).decide(0.0, [replica()], expected(80.0)).wanted == 2


def test_replicas_that_would_not_help_are_not_started():
    """A limit that one request alone misses is missed by any number."""
    hopeless = ScalingGoal(slo=Slo(tpot_s=1e-4), max_replicas=8)
    decision = ScalingPolicy(hopeless, start_s=START_S).decide(0.0, [replica()], expected(20.0))
    assert decision.wanted == 1


def test_the_fleet_shrinks_when_bursts_would_be_served_and_not_at_once():
    fleet = [replica() for _ in range(4)]
    for wanted, load in ((1, expected(5.0)), (4, expected(5.0, 110.0))):
        scaling = policy()
        first = [scaling.decide(now_s, fleet, load).wanted for now_s in range(0, 40, 5)]
        assert first == [4] * 8
        assert scaling.decide(45.0, fleet, load).wanted == wanted
    assert policy(min_replicas=2).decide(0.0, [replica()], expected(0.0)).wanted == 2
    assert policy(max_replicas=2).decide(0.0, fleet, expected(0.0)).wanted <= 2


def test_a_need_within_the_dwell_keeps_a_replica():
    fleet, scaling = [replica() for _ in range(4)], policy()
    wanted = []
    for number in range(20):
        rate = 110.0 if number % 5 == 4 else 5.0
        wanted.append(scaling.decide(5.0 * number, fleet, expected(5.0, rate)).wanted)
    assert set(wanted) == {4}


def test_there_is_no_fleet_of_none():
    with pytest.raises(SettingsError, match="1 replica"):
        ScalingGoal(slo=LIMITS, min_replicas=0, max_replicas=2)
    with pytest.raises(SettingsError, match="1 replica"):
        ScalingGoal(slo=LIMITS, min_replicas=3, max_replicas=2)


@pytest.mark.slow
def test_constant_load_turns_the_fleet_at_most_once_in_ten_minutes():
    machine = machine_of("l40s")
    arrivals = a_day(seconds=1800, peak_rps=6.0, num_bursts=0, burst_s=1.0, seed=4, flat=True)
    outcome = run(machine, arrivals, Ours(machine, 30.0), start_s=30.0)
    by_ten_minutes = Counter(int(at_s // 600) for at_s in outcome.reversals)
    assert max(by_ten_minutes.values(), default=0) <= 1
    assert outcome.attainment > 0.93
