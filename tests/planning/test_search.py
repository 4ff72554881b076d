"""Searches: the highest load, the cheapest machines, placements, and what they leave out."""

from dataclasses import replace

import pytest
from tests.planning.questions import CATALOGUE, model, question

from ridgeline.core.config import EngineConfig
from ridgeline.core.formats import FLOAT32
from ridgeline.planning import (
    ModelDemand,
    Slo,
    TooLongError,
    answer,
    capacity,
    catalogue_machine,
    cheapest,
    cheapest_placement,
    highest_rate,
    load,
    place_models,
    search,
)
from ridgeline.planning.replica import choose_replica


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
    few = EngineConfig(max_num_seqs=32)
    asked = question(count=2, slo=Slo(tpot_s=0.001), rate_rps=1.0, config=few)
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
        ModelDemand(name=name, question=question(name), rate_rps=0.0)
        for name in ("llama-2-13b", "llama-2-13b", "llama-3.1-8b", "llama-2-13b")
    ]
    placed = place_models(loads, [machine]).placement
    assert not placed.left_over
    assert placed.num_used == 2


def test_models_are_placed_on_devices_of_several_kinds():
    """On the L4 there is room for the small one alone."""
    machines = [catalogue_machine(CATALOGUE, key) for key in ("l4", "a100-40")]
    loads = [
        ModelDemand(name=n, question=question(n), rate_rps=0.0) for n in ("llama-2-13b", "gpt2")
    ]
    placed = place_models([loads[0], loads[0], *loads[1:]], machines)
    bins = zip(placed.machines, placed.placement.bins, strict=True)
    held = {machine.key: [item.name for item in items] for machine, items in bins}
    assert "llama-2-13b" in held["a100-40"]
    assert "llama-2-13b" not in held["l4"]
    assert [item.name for item in placed.placement.left_over] == ["llama-2-13b"]
    assert placed.usd_per_hour is None  # the A100 of 40 GB has no price


def test_the_cheapest_devices_for_several_models_may_be_of_several_kinds():
    few = replace(CATALOGUE, devices={k: CATALOGUE.devices[k] for k in ("t4", "a100", "h100")})
    names = ("llama-2-13b", "llama-2-13b", "llama-2-13b", "qwen2.5-0.5b")
    loads = [ModelDemand(name=name, question=question(name), rate_rps=0.0) for name in names]
    placed = cheapest_placement(loads, few)
    keys = sorted(machine.key for machine in placed.machines)
    assert keys == ["a100", "a100"]
    assert placed.usd_per_hour == pytest.approx(2 * 2.45)
    assert cheapest_placement(loads[:1], replace(few, devices={"t4": few.devices["t4"]})) is None


def test_a_load_shares_a_device_or_takes_several():
    few = replace(CATALOGUE, devices={"l4": CATALOGUE.devices["l4"]})
    limits = Slo(ttft_s=2.0, tpot_s=0.1)
    asked = question("qwen2.5-0.5b", slo=limits, output_tokens=30, num_requests=None)
    small = cheapest_placement([ModelDemand(name="a", question=asked, rate_rps=1.0)], few)
    large = cheapest_placement([ModelDemand(name="a", question=asked, rate_rps=200.0)], few)
    assert len(small.machines) == 1
    assert len(large.machines) > 1


def test_the_highest_rate_of_a_model_that_does_not_fit():
    plan = highest_rate(question("llama-3.1-70b", "h100", slo=Slo(ttft_s=1.0)))
    assert plan is not None
    assert not plan.fits
