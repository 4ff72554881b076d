"""Replicas on one clock: one is what the planner simulates, several are shared by a policy."""

import pytest
from tests.planning.questions import CATALOGUE, model

from ridgeline.core.config import EngineConfig
from ridgeline.fleet import simulation
from ridgeline.fleet.policies import POLICIES
from ridgeline.fleet.simulation import SimulatedMachine, simulate_fleet
from ridgeline.planning import Arrival, catalogue_machine, poisson, simulate

CONFIG = EngineConfig(max_num_seqs=16, max_model_len=4096)
MODEL, CALIBRATION = model("qwen2.5-0.5b"), catalogue_machine(CATALOGUE, "l4").calibration
KV_BYTES = 1e9
MACHINE = SimulatedMachine.of_model(MODEL, CALIBRATION, CONFIG, kv_pool_bytes=KV_BYTES)


def run(arrivals, policy="price", count=1):
    return simulate_fleet(MACHINE, arrivals, POLICIES[policy](), count=count)


def times(traffic):
    found = sorted(traffic.answers, key=lambda each: each.arrival.arrival_s)
    return [(each.arrival, each.timings.ttft_s, each.done_s) for each in found]


def agents(count):
    """Requests of eight agents in turn, each with instructions of its own."""
    return [
        Arrival(
            arrival_s=0.04 * number,
            prompt_tokens=2100,
            output_tokens=20,
            prefix=f"agent {number % 8}",
            prefix_tokens=2000,
        )
        for number in range(count)
    ]


def test_one_replica_is_that_of_the_planner():
    arrivals = poisson(rate_rps=40, num_requests=40, prompt_tokens=300, output_tokens=40, seed=1)
    alone = simulate(MODEL, CALIBRATION, arrivals, CONFIG, kv_pool_bytes=KV_BYTES)
    for (ours, *found), (theirs, *expected) in zip(
        times(run(arrivals).traffic), times(alone), strict=True
    ):
        assert ours == theirs
        assert found == pytest.approx(expected, rel=1e-9)


def test_several_share_and_give_the_same_bits_again():
    arrivals = poisson(rate_rps=200, num_requests=60, prompt_tokens=300, output_tokens=40, seed=2)
    found = run(arrivals, count=3)
    assert sum(found.num_requests) == 60
    assert min(found.num_requests) > 10
    assert times(found.traffic) == times(run(arrivals, count=3).traffic)
    alone = run(arrivals)
    assert found.traffic.mean_end_to_end_s < alone.traffic.mean_end_to_end_s


def test_the_price_keeps_prefixes_where_they_are():
    by_price, in_turn = (run(agents(60), policy, count=3) for policy in ("price", "round-robin"))
    assert by_price.hit_share > in_turn.hit_share + 0.1
    assert by_price.traffic.mean_ttft_s < in_turn.traffic.mean_ttft_s


def test_replicas_are_run_as_if_each_arrival_looked_at_all(monkeypatch):
    arrivals = poisson(
        rate_rps=250, num_requests=150, prompt_tokens=400, output_tokens=60, spread=0.9, seed=3
    )
    lazy = run(arrivals, "least-loaded", count=6)
    monkeypatch.setattr(simulation, "_SURE", 0.0)
    eager = run(arrivals, "least-loaded", count=6)
    assert lazy.num_requests == eager.num_requests
    for ours, theirs in zip(times(lazy.traffic), times(eager.traffic), strict=True):
        assert ours[1:] == pytest.approx(theirs[1:], rel=1e-9)
