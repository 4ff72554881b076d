"""Plans: against arithmetic that can be done by hand, and against queueing theory."""

import json
import time
from dataclasses import replace

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.formats import number_format
from ridgeline.models import PRESETS, describe, lower
from ridgeline.planning import (
    Arrival,
    Load,
    Question,
    Slo,
    answer,
    catalogue_machine,
    cheapest,
    highest_rate,
    place_models,
    poisson,
    read_trace,
    simulate,
)
from ridgeline.roofline import PricedModel
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.memory import kv_bytes, weights_bytes
from ridgeline.roofline.queueing import mg1_wait_s
from ridgeline.scheduler.pricing import LinearPrice

CATALOGUE = load_catalogue()


def model(name, **changes):
    spec = describe(dict(PRESETS[name])).spec
    return PricedModel(spec=spec, ops=lower(spec), **changes)


def question(name="llama-3.1-8b", hardware="l4", count=1, **changes):
    values = {"prompt_tokens": 300, "output_tokens": 60, "num_requests": 40} | changes
    return Question(
        model=values.pop("model", None) or model(name),
        machine=catalogue_machine(CATALOGUE, hardware, count),
        **values,
    )


def test_a_model_that_does_not_fit_says_so_and_predicts_nothing():
    result = answer(question("llama-3.1-70b", "h100")).to_json()
    assert result["fits"] is False
    assert result["ttft_s"] is None
    assert result["weights_bytes"] == pytest.approx(141e9, rel=0.01)


def test_decode_cannot_beat_the_bandwidth():
    result = answer(question(prompt_tokens=1000)).to_json()
    floor = result["weights_bytes"] / 0.3e12
    assert floor < result["tpot_s"] < 1.5 * floor
    assert result["bound"] == {"prefill": "compute", "decode": "memory"}
    low, high = result["interval_80"]["tpot_s"]
    assert low < result["tpot_s"] < high
    assert json.loads(json.dumps(result)) == result


def test_quantized_weights_are_faster_and_leave_room():
    plain = answer(question()).to_json()
    small = answer(question(model=model("llama-3.1-8b", weights=number_format("int4")))).to_json()
    assert small["tpot_s"] < 0.5 * plain["tpot_s"]
    assert small["max_batch"] > 2 * plain["max_batch"]


def test_devices_share_a_model_only_when_they_must():
    result = answer(question("llama-3.1-70b", "h100", 8, prompt_tokens=2000)).to_json()
    assert (result["tensor_parallel"], result["replicas"]) == (4, 2)
    with pytest.raises(InvalidRequestError, match="do not divide"):
        answer(question("llama-3.1-70b", "h100", 8, tensor=3))
    with pytest.raises(InvalidRequestError, match="exchange"):
        answer(question("llama-3.1-8b", "m4-max", 2, tensor=2))


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(InvalidRequestError, match="context"):
        answer(question("gpt2", prompt_tokens=1000, output_tokens=100))


@pytest.mark.parametrize("share", [0.9, 1.0, 1.25, 1.5, 2.0, 2.5])
def test_what_fits_behind_a_window_is_what_the_engine_takes(share):
    """Memory for so many times the window: if the plan says that it fits, the engine starts."""
    windowed = model("mistral-7b")
    machine = catalogue_machine(CATALOGUE, "l4")
    room = weights_bytes(windowed) + share * kv_bytes(windowed, windowed.spec.max_position)
    asked = question(model=windowed, prompt_tokens=12_000, output_tokens=20, num_requests=4)
    plan = answer(replace(asked, machine=replace(machine, memory_bytes=room / 0.9)))
    assert plan.fits == plan.replica.fit.fits == (share > 2)


def test_the_highest_rate_holds_and_a_higher_one_does_not():
    asked = question(slo=Slo(ttft_s=1.0, tpot_s=0.1))
    best = highest_rate(asked)
    assert best.traffic.attainment(asked.slo) >= 0.9
    worse = answer(replace(best.question, rate_rps=best.question.rate_rps * 1.6))
    assert worse.traffic.attainment(asked.slo) < 0.9
    assert highest_rate(replace(asked, slo=Slo(tpot_s=0.001))) is None


def test_the_cheapest_machines_come_first():
    small = question("qwen2.5-0.5b", rate_rps=2.0, slo=Slo(ttft_s=1.0), output_tokens=20)
    few = replace(CATALOGUE, devices={k: CATALOGUE.devices[k] for k in ("t4", "l4", "h100")})
    plans = cheapest(small, few)
    prices = [plan.usd_per_hour for plan in plans]
    assert prices == sorted(prices)
    assert plans[0].question.machine.key == "t4"


def test_models_are_placed_within_memory_and_load():
    machine = catalogue_machine(CATALOGUE, "a100", 2)
    loads = [
        Load(name=name, question=question(name), rate_rps=0.0)
        for name in ("llama-2-13b", "llama-2-13b", "llama-3.1-8b", "llama-2-13b")
    ]
    placed = place_models(loads, machine)
    assert not placed.left_over
    assert placed.num_used == 2


def test_one_at_a_time_waits_as_queueing_theory_says():
    """One sequence at a time, constant service: M/D/1."""
    price = LinearPrice(pass_s=0.01, token_s=0.0)
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
    traffic = simulate(model("gpt2"), quiet, arrivals, config, kv_pool_bytes=1e9, price=price)
    waits = [item.timings.ttft_s - 0.01 for item in traffic.answers]
    expected = mg1_wait_s(rate, 0.1, 0.01)
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
        '{"arrival_s": 2, "prompt_tokens": 5, "output_tokens": 3}\n\n'
        '{"arrival_s": 1, "prompt_tokens": 7, "output_tokens": 1}\n'
    )
    assert read_trace(path)[0] == Arrival(arrival_s=1, prompt_tokens=7, output_tokens=1)
    for bad in ("", "{}", '{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 3}', "[1]"):
        path.write_text(bad)
        with pytest.raises(InvalidRequestError, match="trace"):
            read_trace(path)
