"""Plans: against arithmetic that can be done by hand, and against queueing theory."""

import json
import time
from dataclasses import replace

import msgspec
import pytest

from ridgeline.bench.serve.workload import read_trace as bench_trace
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.formats import BFLOAT16, FLOAT16, FLOAT32, number_format
from ridgeline.models import PRESETS, describe, lower
from ridgeline.planning import (
    Arrival,
    Load,
    Question,
    Slo,
    TooLongError,
    answer,
    capacity,
    catalogue_machine,
    cheapest,
    highest_rate,
    load,
    place_models,
    poisson,
    read_trace,
    search,
    simulate,
)
from ridgeline.planning.replica import choose_replica, replica_choices, splits
from ridgeline.planning.workload import paced
from ridgeline.roofline import PricedModel
from ridgeline.roofline.catalogue import load_catalogue
from ridgeline.roofline.fitting import of_new_format
from ridgeline.roofline.memory import USABLE_SHARE, kv_bytes, weights_bytes
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


def test_a_format_that_was_not_measured_has_its_own_interval():
    asked = question(num_requests=4)
    calibration = asked.machine.calibration
    wide = msgspec.structs.replace(calibration.spreads["decode"], low=0.1, high=10.0)
    spreads = calibration.spreads | {of_new_format("decode"): wide}
    known = msgspec.structs.replace(calibration, spreads=spreads, formats=("bfloat16",))
    machine = replace(asked.machine, calibration=known)
    narrow, unseen = (
        answer(replace(asked, machine=machine, model=each)).to_json()["interval_80"]["tpot_s"]
        for each in (model("llama-3.1-8b"), model("llama-3.1-8b", weights=number_format("int4")))
    )
    assert narrow[1] / narrow[0] < 3
    assert unseen[1] / unseen[0] > 50


def test_quantized_weights_are_faster_and_leave_room():
    plain = answer(question()).to_json()
    small = answer(question(model=model("llama-3.1-8b", weights=number_format("int4")))).to_json()
    assert small["tpot_s"] < 0.5 * plain["tpot_s"]
    assert small["max_batch"] > 2 * plain["max_batch"]


def test_devices_share_a_model_only_when_they_must():
    result = answer(question("llama-3.1-70b", "h100", 8, prompt_tokens=4000)).to_json()
    assert (result["tensor_parallel"], result["replicas"]) == (4, 2)
    two, chosen = (
        choose_replica(question("llama-3.1-70b", "h100", 8, prompt_tokens=1000, tensor=tensor))
        for tensor in (2, None)
    )
    assert 16 < two.fit.max_batch < 64 <= chosen.fit.max_batch
    assert chosen.model.layout.tensor == 4
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
    plan = answer(replace(asked, machine=replace(machine, memory_bytes=room / USABLE_SHARE)))
    assert plan.fits == plan.replica.fit.fits == (share > 2)


def test_the_highest_rate_holds_and_a_higher_one_does_not():
    few = EngineConfig(max_num_seqs=32)
    asked = question(slo=Slo(ttft_s=1.0, tpot_s=0.1), config=few)
    best = highest_rate(asked)
    assert best.traffic.attainment(asked.slo) >= 0.9
    worse = answer(replace(best.question, rate_rps=best.question.rate_rps * 1.6))
    assert worse.traffic.attainment(asked.slo) < 0.9
    assert highest_rate(replace(asked, slo=Slo(tpot_s=0.001))) is None


def test_wider_replicas_are_tried_where_narrow_ones_miss_a_limit():
    """The fewest devices that hold 70B decode in 16 ms or more."""
    asked = question("llama-3.1-70b", "h100", 8, prompt_tokens=1000)
    assert answer(asked).replica.model.layout.tensor < 8
    fast = replace(asked, slo=Slo(tpot_s=0.013), output_tokens=30)
    best = highest_rate(fast)
    assert best.replica.model.layout.tensor == 8
    assert best.question.rate_rps > 0
    again = answer(replace(fast, rate_rps=best.question.rate_rps))
    assert again.replica.model.layout.tensor == 8
    assert again.traffic.attainment(fast.slo) >= 0.9
    assert highest_rate(replace(fast, tensor=4)) is None


def test_of_widths_that_meet_the_limits_that_of_the_highest_rate_counts():
    """One device holds the model and the limit, two hold it at half as much again."""
    few = EngineConfig(max_num_seqs=32)
    limits = Slo(tpot_s=0.075)
    asked = question("llama-3.1-8b", "l4", 2, slo=limits, output_tokens=30, config=few)
    alone, both = (highest_rate(replace(asked, tensor=tensor)) for tensor in (1, 2))
    assert both.question.rate_rps > 1.2 * alone.question.rate_rps
    best = highest_rate(asked)
    assert best.replica.model.layout.tensor == 2
    assert best.question.rate_rps == pytest.approx(both.question.rate_rps, rel=0.05)


def test_the_cheapest_machines_may_be_wide_replicas():
    asked = question("llama-3.1-70b", rate_rps=0.5, slo=Slo(tpot_s=0.013), output_tokens=30)
    few = replace(CATALOGUE, devices={"h100": CATALOGUE.devices["h100"]})
    (plan,) = cheapest(asked, few).plans
    assert (plan.question.machine.count, plan.replica.model.layout.tensor) == (8, 8)


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


def test_machines_that_take_too_long_to_simulate_are_left_out(monkeypatch):
    """On an L4 many more are in progress than on an H100."""
    monkeypatch.setattr(load, "WANTED_STEPS", 300)
    monkeypatch.setattr(load, "MOST_STEPS", 400)
    asked = question("llama-3.1-8b", rate_rps=10.0, num_requests=None)
    few = replace(CATALOGUE, devices={k: CATALOGUE.devices[k] for k in ("l4", "h100")})
    found = cheapest(asked, few)
    machines = [plan.question.machine for plan in found.plans]
    assert [(each.key, each.count) for each in machines] == [("l4", 4), ("h100", 1)]
    assert found.notes == [
        "Left out, as simulating it would take minutes: 1 × NVIDIA L4, 2 × NVIDIA L4."
    ]
    with pytest.raises(TooLongError):
        answer(asked)


def test_rates_that_take_too_long_to_simulate_are_left_out(monkeypatch):
    monkeypatch.setattr(load, "WANTED_STEPS", 300)
    monkeypatch.setattr(load, "MOST_STEPS", 700)
    asked = question("llama-3.1-8b", "h100", slo=Slo(tpot_s=0.1), num_requests=None)
    best = highest_rate(asked)
    assert best.question.rate_rps > 0
    assert "requests/s on 1 device a replica" in best.notes[0]
    monkeypatch.setattr(load, "MOST_STEPS", 10)
    with pytest.raises(TooLongError):
        highest_rate(asked)


def test_widths_that_take_too_long_to_simulate_are_left_out(monkeypatch):
    asked = question(count=2, slo=Slo(tpot_s=0.001), rate_rps=1.0)
    simulates = search.run_traffic

    def only_wide(asked, replica, price):
        if replica.model.layout.tensor == 1:
            raise TooLongError("long")
        return simulates(asked, replica, price)

    for module in (search, capacity):
        monkeypatch.setattr(module, "run_traffic", only_wide)
    missed = answer(asked)
    assert missed.replica.model.layout.tensor == 2
    assert "take minutes: on 1 device a replica." in missed.notes[-1]
    best = highest_rate(replace(asked, slo=Slo(tpot_s=0.5), rate_rps=None))
    assert best.replica.model.layout.tensor == 2
    assert "take minutes: on 1 device a replica." in best.notes[-1]


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


def test_what_is_no_gpu_is_priced_as_one_and_says_so():
    assert answer(question("qwen2.5-0.5b", "h100")).notes == []
    (note,) = answer(question("qwen2.5-0.5b", "xeon-8480")).to_json()["notes"]
    assert "is a CPU, of which the efficiencies of tuned GPU engines are assumed" in note
    (note,) = answer(question("qwen2.5-0.5b", "tpu-v5e")).to_json()["notes"]
    assert "No executor of ours runs there" in note


def test_bfloat16_is_slow_without_tensor_cores_that_have_it():
    slow, fast = (
        answer(question(model=model("qwen2.5-0.5b", activations=form), hardware="t4"))
        for form in (BFLOAT16, FLOAT16)
    )
    assert "--dtype float16 has 8 times as much" in slow.notes[0]
    assert fast.notes == []
    assert slow.alone_ttft_s > 3 * fast.alone_ttft_s


def test_weights_of_a_format_without_a_rate_are_multiplied_in_the_activations():
    """FP8 on a T4: in bfloat16, at float32's rate, not at that of float16."""
    fp8 = number_format("fp8")
    for form in (BFLOAT16, FLOAT16):
        asked = question(model=model("qwen2.5-0.5b", activations=form), hardware="t4")
        asked = replace(asked, prompt_tokens=1000, output_tokens=2)
        small = replace(asked, model=replace(asked.model, weights=fp8, compute=fp8))
        plain, packed = answer(asked), answer(small)
        assert packed.alone_ttft_s == pytest.approx(plain.alone_ttft_s, rel=0.05)
        assert packed.notes == plain.notes
    ada = replace(small, machine=catalogue_machine(CATALOGUE, "l4"))
    assert choose_replica(ada).model.compute == fp8


def test_bfloat16_is_called_slow_only_where_products_take_float32s_rate():
    asked = question("qwen2.5-0.5b", "t4")
    assert len(answer(asked).notes) == 1
    fp8 = number_format("fp8")
    packed = replace(asked.model, weights=fp8, compute=fp8)

    def notes(form=None, **changes):
        calibration = asked.machine.calibration
        roof = calibration.ceilings
        roof = replace(roof, measured=form == "measured", flops_per_s=roof.flops_per_s | changes)
        if form == "measured":
            assert msgspec.structs.replace(calibration, ceilings=roof).measured
        machine = replace(
            asked.machine, calibration=msgspec.structs.replace(calibration, ceilings=roof)
        )
        chosen = packed if form == "fp8" else asked.model
        return answer(replace(asked, machine=machine, model=chosen, output_tokens=2)).notes

    assert notes(bfloat16=60e12) == []  # a bit less than float16's 65
    assert notes("measured") == []
    assert len(notes("fp8")) == 1
    assert notes("fp8", fp8=130e12) == []


def test_devices_without_a_link_hold_a_replica_each():
    asked = question("llama-3.1-8b", "m3-max", 2, prompt_tokens=20_000, output_tokens=2)
    found = choose_replica(asked)
    assert 0 < found.fit.max_batch < 64
    assert (found.model.layout.tensor, found.count) == (1, 2)
    assert len(replica_choices(replace(asked, slo=Slo(ttft_s=1.0)))) == 1
    with pytest.raises(InvalidRequestError, match="exchange"):
        choose_replica(replace(asked, tensor=2))
    large = answer(question("llama-3.1-70b", "m3-max", 2))
    assert not large.fits
    assert "how fast they exchange data is not known" in large.notes[-1]


def test_a_replica_stays_in_one_host_and_says_so():
    plan = answer(question("deepseek-v3", "h100", 16))
    assert not plan.fits
    (note,) = plan.to_json()["notes"]
    assert note.startswith("A replica is spread over 8 of the 16 devices at the most")
    assert answer(question("llama-3.1-70b", "h100")).notes == []


def test_the_datasheets_power_is_an_upper_bound():
    result = answer(question("llama-3.1-8b", "h100", 2)).to_json()
    assert result["power_w"] == 1400
    joules = result["joules_per_output_token_at_most"]
    assert joules * result["output_tok_s"] == pytest.approx(1400)
    unknown = answer(question("qwen2.5-0.5b", "tpu-v5e")).to_json()
    assert (unknown["power_w"], unknown["joules_per_output_token_at_most"]) == (None, None)


def test_the_cheapest_machines_come_first():
    small = question("qwen2.5-0.5b", rate_rps=2.0, slo=Slo(ttft_s=1.0), output_tokens=20)
    few = replace(CATALOGUE, devices={k: CATALOGUE.devices[k] for k in ("t4", "l4", "h100")})
    seen: list[str] = []
    plans = cheapest(small, few, seen.append).plans
    assert seen == ["1 × NVIDIA T4", "1 × NVIDIA L4", "1 × NVIDIA H100 SXM"]
    prices = [plan.usd_per_hour for plan in plans]
    assert prices == sorted(prices)
    assert plans[0].question.machine.key == "t4"


def test_machines_that_are_far_too_small_are_not_simulated(monkeypatch):
    def simulates(*_):
        raise AssertionError

    monkeypatch.setattr(search, "run_traffic", simulates)
    few = replace(CATALOGUE, devices={"t4": CATALOGUE.devices["t4"]})
    assert cheapest(question("qwen2.5-0.5b", rate_rps=5000.0), few).plans == []


def test_nor_are_those_whose_decode_steps_alone_take_too_long():
    """Prompts cannot hide what decode takes; a saturated machine answers fewer still."""
    asked = question("llama-3.1-8b", "h100", prompt_tokens=20, output_tokens=100)
    replica = choose_replica(asked)
    predictor = capacity.predictor_of(asked, replica)
    saturated_rps = answer(asked).traffic.completed_rps

    def is_skipped(factor):
        loaded = replace(asked, rate_rps=factor * saturated_rps)
        return search._is_far_too_small(loaded, replica, predictor)

    assert [is_skipped(factor) for factor in (1.0, 1.1, 1.7)] == [False, False, True]


def test_machines_without_a_rate_for_the_models_type_are_no_candidates():
    single = question("gpt2", model=model("gpt2", activations=FLOAT32), rate_rps=1.0)
    few = replace(CATALOGUE, devices={k: CATALOGUE.devices[k] for k in ("tpu-v5e", "t4")})
    assert [plan.question.machine.key for plan in cheapest(single, few).plans] == ["t4"]


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


def test_there_is_no_tpot_of_one_token():
    result = answer(question(output_tokens=1)).to_json()
    assert result["ttft_s"] > 0
    assert {result[name] for name in ("tpot_s", "alone_tpot_s", "loaded_tpot_s")} == {None}
    assert result["interval_80"]["tpot_s"] is None


def test_the_highest_rate_of_a_model_that_does_not_fit():
    plan = highest_rate(question("llama-3.1-70b", "h100", slo=Slo(ttft_s=1.0)))
    assert plan is not None
    assert not plan.fits


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


@pytest.mark.parametrize(
    ("prompt", "output", "low", "high"), [(2000, 4, 0.7, 1), (20, 200, 0, 0.2)]
)
def test_money_goes_where_the_time_goes(prompt, output, low, high):
    result = answer(question(prompt_tokens=prompt, output_tokens=output)).to_json()
    prices = result["usd_per_1m_by_phase"]
    spent = prices["input"] * result["input_tok_s"] * 3600 / 1e6
    rest = prices["output"] * result["output_tok_s"] * 3600 / 1e6
    assert spent + rest == pytest.approx(result["usd_per_hour"])
    assert low < spent / result["usd_per_hour"] < high


def test_a_load_is_not_faster_than_a_lone_request():
    """The host's time hides behind the step before in both."""
    result = answer(question("qwen2.5-0.5b", "h100", rate_rps=1.0)).to_json()
    assert result["alone_tpot_s"] <= 1.001 * result["loaded_tpot_s"]


def test_ranks_share_whole_heads():
    spec = model("qwen2.5-0.5b").spec  # 14 heads, 2 of K and V
    assert [n for n in range(1, 15) if splits(spec, n)] == [1, 2, 14]
    with pytest.raises(InvalidRequestError, match="heads cannot be split over 4"):
        answer(question("qwen2.5-0.5b", "h100", 4, tensor=4))
    with pytest.raises(InvalidRequestError, match="cross hosts"):
        answer(question("llama-3.1-70b", "h100", 16, tensor=16))


def test_copies_of_kv_heads_hold_no_more_sequences():
    wide = choose_replica(question("gemma-3-1b", "l4", 4, tensor=4))
    assert wide.kv_pool_bytes == wide.fit.kv_pool_bytes


def test_here_kv_has_the_share_that_an_engine_gives_it():
    asked = question(model=model("gpt2"))
    machine = replace(asked.machine, memory_bytes=2e9, kv_share=0.4)
    found = choose_replica(replace(asked, machine=machine)).fit
    assert found.kv_pool_bytes == pytest.approx(0.4 * (2e9 - weights_bytes(model("gpt2"))))
