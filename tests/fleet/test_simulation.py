"""Replicas on one clock: one is what the planner simulates, several are shared by a policy."""

import pytest
from tests.planning.questions import CATALOGUE, model

from ridgeline.core.config import EngineConfig
from ridgeline.fleet import simulation
from ridgeline.fleet.disaggregated import SimulatedLink, simulate_disaggregated
from ridgeline.fleet.policies import POLICIES
from ridgeline.fleet.simulation import SimulatedMachine, simulate_fleet
from ridgeline.planning import Arrival, catalogue_machine, poisson, simulate
from ridgeline.roofline.memory import kv_bytes_per_token

CONFIG = EngineConfig(max_num_seqs=16, max_model_len=4096)
MODEL, CALIBRATION = model("qwen2.5-0.5b"), catalogue_machine(CATALOGUE, "l4").calibration
KV_BYTES = 1e9
MACHINE = SimulatedMachine.of_model(MODEL, CALIBRATION, CONFIG, kv_pool_bytes=KV_BYTES)


def run(arrivals, policy="least-seconds", count=1):
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


def test_predicted_seconds_keep_prefixes_where_they_are():
    by_seconds, in_turn = (
        run(agents(60), policy, count=3) for policy in ("least-seconds", "round-robin")
    )
    assert by_seconds.hit_share > in_turn.hit_share + 0.1
    assert by_seconds.traffic.mean_ttft_s < in_turn.traffic.mean_ttft_s


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


LARGE = model("llama-3.1-8b")
A100 = SimulatedMachine.of_model(
    LARGE,
    catalogue_machine(CATALOGUE, "a100").calibration,
    EngineConfig(max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=8192),
    kv_pool_bytes=4e10,
)


def long_prompts(count):
    return poisson(
        rate_rps=9, num_requests=count, prompt_tokens=3000, output_tokens=200, spread=0.5, seed=1
    )


def handed_over(arrivals, bytes_per_s, **settings):
    link = SimulatedLink(token_bytes=kv_bytes_per_token(LARGE), bytes_per_s=bytes_per_s)
    return simulate_disaggregated(A100, arrivals, link, count=4, **settings)


def late_tpot_s(traffic):
    """Mean seconds a token, once the load is known."""
    late = [each.timings.tpot_s for each in traffic.answers if each.arrival.arrival_s > 8]
    return sum(late) / len(late)


def test_prompts_are_handed_over_where_that_saves_seconds():
    arrivals = long_prompts(150)
    alone = simulate_fleet(A100, arrivals, POLICIES["least-seconds"](), count=4).traffic
    found, share = handed_over(arrivals, 1e10)
    assert len(found.traffic.answers) == 150
    assert 0.3 < share < 0.95
    assert late_tpot_s(found.traffic) < 0.9 * late_tpot_s(alone)
    slow, share = handed_over(arrivals, 1e8)
    assert share == 0
    assert times(slow.traffic) == times(alone)


def test_fixed_roles_are_kept_and_a_slow_wire_delays_the_second_token():
    arrivals = long_prompts(20)
    fast, share = handed_over(arrivals, 1e10, num_prefill=3)
    assert share == 1
    assert fast.num_requests == (0, 0, 0, 20)
    again, _ = handed_over(arrivals, 1e10, num_prefill=3)
    assert times(again.traffic) == times(fast.traffic)
    slow, _ = handed_over(arrivals, 1e9, num_prefill=3)
    assert slow.traffic.mean_ttft_s == pytest.approx(fast.traffic.mean_ttft_s, rel=0.05)
    wire_s = 3000 * kv_bytes_per_token(LARGE) * (1e-9 - 1e-10)
    added_s = slow.traffic.mean_end_to_end_s - fast.traffic.mean_end_to_end_s
    assert added_s > 0.8 * wire_s
