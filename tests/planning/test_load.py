"""Loads: arrivals, traces, queues, and how much of them is simulated."""

import time
from dataclasses import replace

import pytest
from tests.planning.questions import CATALOGUE, model, question

from ridgeline.bench.serve.workload import read_trace as bench_trace
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import InvalidRequestError
from ridgeline.planning import (
    Arrival,
    answer,
    capacity,
    catalogue_machine,
    load,
    poisson,
    read_trace,
    simulate,
)
from ridgeline.planning.replica import choose_replica
from ridgeline.planning.workload import paced
from ridgeline.scheduler.prediction import LinearPredictor


def test_no_more_run_at_once_than_a_step_has_tokens():
    """Others would wait; the plan takes no longer than what it is about."""
    narrow = EngineConfig(max_num_seqs=256, max_num_batched_tokens=1)
    plan = answer(question("qwen2.5-0.5b", "h100", config=narrow, prompt_tokens=20))
    assert len(plan.traffic.answers) == 2
    assert plan.traffic.num_steps < 2 * (20 + 60) + 4


def test_a_load_of_very_long_answers_is_shortened_and_says_so(monkeypatch):
    monkeypatch.setattr(load, "WANTED_STEPS", 2000)
    monkeypatch.setattr(load, "MOST_STEPS", 3000)
    asked = question("qwen2.5-0.5b", "h100", rate_rps=0.1, num_requests=None, output_tokens=100)
    plan = answer(asked)
    assert len(plan.traffic.answers) == 18  # of 101 steps each, and a tenth for their sequence
    assert "18 requests of each replica are simulated, not 80," in plan.to_json()["notes"][0]
    whole = answer(replace(asked, num_requests=40))
    assert len(whole.traffic.answers) == 40
    assert whole.notes == []
    with pytest.raises(InvalidRequestError, match="12 requests of these lengths would take"):
        answer(replace(asked, output_tokens=300))


def test_a_shortened_load_is_long_enough_to_see_that_a_machine_keeps_up(monkeypatch):
    monkeypatch.setattr(load, "WANTED_STEPS", 1)
    asked = question("llama-3.1-8b", "h100", rate_rps=40.0, num_requests=None, output_tokens=200)
    plan = answer(asked)
    assert plan.keeps_up
    assert plan.traffic.num_left_out > 0
    assert plan.to_json()["completed_rps"] == pytest.approx(40.0, rel=0.05)


def test_so_is_what_saturates_a_machine(monkeypatch):
    asked = question("qwen2.5-0.5b", "h100", config=EngineConfig(max_num_seqs=10))
    for most, left_out in ((1000, 0), (200, 10)):  # a wave is 61 steps, and 6.1 a sequence
        monkeypatch.setattr(load, "MOST_SATURATED_STEPS", most)
        plan = answer(asked)
        assert len(plan.traffic.answers) == 20 - left_out
        assert plan.traffic.num_left_out == left_out
        assert len(plan.notes) == (left_out > 0)
    monkeypatch.setattr(load, "MOST_SATURATED_STEPS", 100)
    with pytest.raises(InvalidRequestError, match="10 requests of these lengths at once would"):
        answer(asked)
    with pytest.raises(InvalidRequestError, match="A single request of these lengths would"):
        answer(replace(asked, output_tokens=200, rate_rps=1.0))


def test_a_load_that_was_answered_once_is_refused_no_longer():
    """As many in progress as run at once, each of 1,100 tokens."""
    asked = question("llama-3.1-8b", "h100", rate_rps=25.0, num_requests=None)
    asked = replace(asked, prompt_tokens=500, output_tokens=1100)
    assert load._num_simulated(asked, choose_replica(asked), 60.0) == 3 * 256


def test_what_is_left_out_is_counted_by_how_long_requests_stay_under_load(monkeypatch):
    """Also where the first run, by how long one stays alone, is the only one."""
    monkeypatch.setattr(load, "WANTED_STEPS", 1)
    monkeypatch.setattr(load, "_MORE", 100.0)
    asked = question("llama-3.1-8b", "h100", rate_rps=40.0, num_requests=None, output_tokens=200)
    replica = choose_replica(asked)
    traffic = load.run_traffic(asked, replica, capacity.predictor_of(asked, replica))
    in_progress = 40.0 * traffic.mean_end_to_end_s
    expected = pytest.approx(6 * in_progress, abs=1)
    assert len(traffic.answers) < 0.4 * 6 * in_progress  # it was made once
    assert traffic.num_left_out + len(traffic.answers) == expected
    monkeypatch.setattr(load, "WANTED_STEPS", 10**6)
    whole = load.run_traffic(asked, replica, capacity.predictor_of(asked, replica))
    assert whole.num_left_out == 0


def test_one_at_a_time_waits_as_queueing_theory_says():
    """One sequence at a time, constant service: M/D/1."""
    predictor = LinearPredictor(pass_s=0.01, token_s=0.0)
    tokens, rate = 10, 7.0  # service 0.1 s, ρ = 0.7
    arrivals = poisson(rate_rps=rate, num_requests=3000, prompt_tokens=5, output_tokens=tokens)
    config = EngineConfig(max_num_seqs=1, max_model_len=64)
    machine = catalogue_machine(CATALOGUE, "l4")
    quiet = type(machine.calibration)(
        **{
            name: getattr(machine.calibration, name)
            for name in machine.calibration.__struct_fields__
        }
        | {"host_step_s": 0.0, "host_segment_s": 0.0}
    )
    traffic = simulate(
        model("gpt2"), quiet, arrivals, config, kv_pool_bytes=1e9, predictor=predictor
    )
    waits = [item.timings.ttft_s - 0.01 for item in traffic.answers]
    load_share = rate * 0.1
    expected = rate * 0.1**2 / (2 * (1 - load_share))  # Pollaczek and Khinchine
    assert sum(waits) / len(waits) == pytest.approx(expected, rel=0.15)


def test_slower_is_slower_in_every_respect():
    arrivals = [Arrival(arrival_s=0.0, prompt_tokens=20, output_tokens=4)] * 3
    machine = catalogue_machine(CATALOGUE, "l4")
    config = EngineConfig(max_num_seqs=2, max_model_len=64)
    traffic = simulate(model("gpt2"), machine.calibration, arrivals, config, kv_pool_bytes=1e9)
    twice = traffic.slower(2.0)
    assert twice.mean_ttft_s == pytest.approx(2 * traffic.mean_ttft_s)
    assert twice.mean_tpot_s == pytest.approx(2 * traffic.mean_tpot_s)
    assert twice.output_tok_s == pytest.approx(traffic.output_tok_s / 2)


def test_a_simulated_step_takes_about_a_millisecond():
    """A minute of 1,000 users is 8,000 steps; benchmarks/observation_cost.py has the figure."""
    arrivals = poisson(rate_rps=15.0, num_requests=60, prompt_tokens=500, output_tokens=100)
    machine = catalogue_machine(CATALOGUE, "h100")
    config = EngineConfig(max_num_seqs=256, max_model_len=1024)
    start = time.process_time()
    traffic = simulate(
        model("llama-3.1-8b"), machine.calibration, arrivals, config, kv_pool_bytes=50e9
    )
    assert traffic.num_steps > 400
    assert time.process_time() - start < 4e-3 * traffic.num_steps


def test_traces_are_read_or_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at_s": 2, "prompt_tokens": 5, "output_tokens": 3, "prefix": "a", "prefix_tokens": 4}\n\n'
        '{"at_s": 1, "prompt_tokens": 7, "output_tokens": 1}\n'
    )
    first, second = read_trace(path)
    assert first == Arrival(arrival_s=1, prompt_tokens=7, output_tokens=1)
    assert (second.prefix, second.prefix_tokens) == ("a", 4)
    for bad in (
        "",
        "{}",
        '{"at_s": -1, "prompt_tokens": 5, "output_tokens": 3}',
        '{"at_s": 1e17, "prompt_tokens": 5, "output_tokens": 3}',
        '{"at_s": 1, "prompt_tokens": 5, "output_tokens": 3, "prefix_tokens": 6}',
        "[1]",
    ):
        path.write_text(bad)
        with pytest.raises(InvalidRequestError, match="trace"):
            read_trace(path)


def test_the_trace_of_a_benchmark_is_one_of_a_plan(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 1, "prompt_tokens": 9, "output_tokens": 2, "prefix_tokens": 4}\n')
    (conversation,), (arrival,) = bench_trace(path, vocab=range(9)), read_trace(path)
    assert conversation.at_s == arrival.arrival_s
    assert len(conversation.turns[0].new_token_ids) == arrival.prompt_tokens


def test_prefixes_of_a_trace_are_computed_once():
    def prefill_s(**prefix):
        arrivals = [
            Arrival(arrival_s=5.0 * i, prompt_tokens=1000, output_tokens=2, **prefix)
            for i in range(4)
        ]
        return answer(question(trace=arrivals)).traffic.prefill_s

    assert prefill_s(prefix="a", prefix_tokens=960) < 0.5 * prefill_s()


def test_a_machine_that_keeps_up_answers_what_arrives():
    """Neither the filling of an empty machine nor its emptying counts."""
    plan = answer(question("llama-3.1-8b", "h100", rate_rps=20.0, prompt_tokens=1000))
    assert plan.keeps_up
    assert plan.to_json()["completed_rps"] == pytest.approx(20.0, rel=0.05)
    last_s = max(each.arrival.arrival_s for each in plan.traffic.answers)
    assert last_s > 4 * plan.traffic.mean_end_to_end_s


def test_paced_arrivals_have_their_rate():
    arrivals = poisson(rate_rps=7.0, num_requests=100, prompt_tokens=1, output_tokens=1, seed=3)
    times = [each.arrival_s for each in paced(arrivals, 7.0)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(100 / 7)
    assert times[33] == pytest.approx(34 / 7)


def test_a_machine_that_falls_behind_says_so():
    plan = answer(question("qwen2.5-0.5b", "t4", rate_rps=1000.0, output_tokens=20))
    assert not plan.keeps_up
    assert plan.to_json()["completed_rps"] < 500


def test_a_machine_that_falls_far_behind_is_as_fast_as_a_full_one():
    """All requests arrive before the first is answered."""
    full = answer(question("llama-3.1-8b", "h100", num_requests=300))
    behind = answer(question("llama-3.1-8b", "h100", rate_rps=1e4, num_requests=300))
    assert not behind.keeps_up
    assert behind.output_tok_s == pytest.approx(full.output_tok_s, rel=0.25)
    assert behind.to_json()["completed_rps"] == pytest.approx(behind.output_tok_s / 60)


def test_one_long_line_leaves_room_for_short_ones():
    long = Arrival(arrival_s=0.0, prompt_tokens=30_000, output_tokens=50)
    short = [Arrival(arrival_s=0.0, prompt_tokens=50, output_tokens=50)] * 12
    plan = answer(question(trace=[*short, long]))
    assert plan.fits
    residences = sum(each.timings.end_to_end_s for each in plan.traffic.answers)
    assert residences > 5 * plan.traffic.seconds


def test_a_trace_is_answered_by_its_own_lengths():
    lines = [Arrival(arrival_s=i / 2, prompt_tokens=600, output_tokens=30) for i in range(10)]
    of_trace = answer(question(trace=lines)).to_json()
    same = answer(question(prompt_tokens=600, output_tokens=30)).to_json()
    assert of_trace["alone_ttft_s"] == same["alone_ttft_s"]
    assert of_trace["alone_ttft_s"] > answer(question()).to_json()["alone_ttft_s"]


def test_a_load_is_not_faster_than_a_lone_request():
    """The host's time hides behind the step before in both."""
    result = answer(question("qwen2.5-0.5b", "h100", rate_rps=1.0)).to_json()
    assert result["alone_tpot_s"] <= 1.001 * result["loaded_tpot_s"]
