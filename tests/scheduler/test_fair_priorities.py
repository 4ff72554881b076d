"""Tenants of one priority share what there is; priorities go first, and without tenants arrival."""

import pytest
from tests.scheduler.simulation import Simulation, make_request

from ridgeline.core.errors import OverloadedError
from ridgeline.core.request import FinishReason
from ridgeline.core.sampling_params import SamplingParams


def flood_and_light(**flood):
    """200 requests at once, and three of another tenant, one every half second."""
    many = [make_request(number, 0.0, tenant="flood", **flood) for number in range(200)]
    return [*many, *(make_request(1000 + n, n / 2, tenant="light") for n in range(1, 4))]


def waits(simulation):
    return [simulation.records[1000 + n].times[0] - n / 2 for n in range(1, 4)]


@pytest.mark.parametrize(
    ("flood", "settings"),
    [
        ({}, {}),
        ({}, {"tpot_slo_s": 0.05}),
        ({"prompt": 200, "output": 50}, {"num_blocks": (70,), "max_model_len": 1000}),
        ({"params": SamplingParams(n=3, max_tokens=16)}, {}),
        ({"adapter": 1}, {}),
        ({"prompt": 3000, "output": 1}, {}),
    ],
    ids=["plain", "slo", "preempted", "samples", "adapter", "prompts"],
)
def test_a_flood_does_not_delay_another_tenant(flood, settings):
    """Longer than until a slot is free, and its prompt goes before those of the flood."""
    simulation = Simulation(scheduling_policy="priority", **settings)
    records = simulation.run(flood_and_light(**flood))
    assert max(waits(simulation)) < 3.0
    in_order = Simulation(scheduling_policy="fcfs", **settings)
    in_order.run(flood_and_light(**flood))
    assert min(waits(in_order)) > 3 * max(waits(simulation))
    assert all(record.finished_s is not None for record in records)
    if "num_blocks" in settings:
        assert simulation.scheduler.num_preemptions > 0
    simulation.scheduler.check_integrity()


def test_without_tenants_equals_go_in_order_of_arrival():
    def arrivals(**more):
        return [
            make_request(n, 0.01 * n, prompt=10 + 37 * n % 500, output=5 + 13 * n % 60, **more)
            for n in range(100)
        ]

    few = {"num_blocks": (60,), "max_model_len": 900}
    times = {
        policy: [r.times for r in Simulation(scheduling_policy=policy, **few).run(arrivals())]
        for policy in ("fcfs", "priority")
    }
    assert times["fcfs"] == times["priority"]


def test_a_higher_number_waits_however_little_its_tenant_had():
    online = [make_request(n, 0.0, tenant="busy", priority=0) for n in range(100)]
    batch = [make_request(500 + n, 0.0, tenant="idle", priority=9) for n in range(20)]
    simulation = Simulation(scheduling_policy="priority")
    simulation.run([*online, *batch])
    first = min(simulation.records[500 + n].times[0] for n in range(20))
    assert first >= sorted(r.times[0] for r in simulation.records.values())[99]


def test_what_a_batch_took_is_no_debt_of_its_tenant_online():
    """Two tenants take turns online, though one of them had much service at a higher number."""
    batch = [make_request(n, 0.0, tenant="both", priority=9, output=200) for n in range(8)]
    online = [
        make_request(100 + n, 5.0, tenant=("both", "other")[n % 2], prompt=200) for n in range(200)
    ]
    simulation = Simulation(scheduling_policy="priority")
    simulation.run([*batch, *online])
    half = sorted((simulation.records[100 + n].times[0], n) for n in range(200))[:100]
    assert sum(n % 2 for _, n in half) == pytest.approx(50, abs=5)


def test_weights_hold_under_priorities():
    arrivals = [
        make_request(n, 0.0, tenant=("a", "b")[n % 2], prompt=100, output=20) for n in range(800)
    ]
    simulation = Simulation(scheduling_policy="priority", tenant_weights={"a": 3.0})
    simulation.run(arrivals, until_s=8.0)
    served = [r.request.tenant for r in simulation.records.values() if r.times]
    assert served.count("a") / served.count("b") == pytest.approx(3.0, rel=0.15)


def test_a_full_queue_gives_places_of_a_flood_to_another_tenant_of_its_priority():
    simulation = Simulation(scheduling_policy="priority", max_num_waiting=5, max_num_seqs=1)
    scheduler = simulation.scheduler
    scheduler.add(make_request(0, 0.0, output=1000, tenant="flood"))
    scheduler.schedule()
    flood = [scheduler.add(make_request(n, 0.0, tenant="flood"))[0] for n in range(1, 6)]
    with pytest.raises(OverloadedError):
        scheduler.add(make_request(6, 0.0, tenant="flood"))
    with pytest.raises(OverloadedError):  # others' places are those of more urgent ones
        scheduler.add(make_request(7, 0.0, tenant="light", priority=1))
    for number in (8, 9):
        scheduler.add(make_request(number, 0.0, tenant="light"))
    with pytest.raises(OverloadedError):  # three and two: it has as many as the flood then
        scheduler.add(make_request(10, 0.0, tenant="light"))
    assert [each.finish_reason for each in flood] == [None] * 3 + [FinishReason.SHED] * 2


def test_tenants_and_priorities_do_not_pile_up_in_memory():
    simulation = Simulation(scheduling_policy="priority")
    simulation.run(
        [make_request(n, n * 0.05, tenant=f"{n}", priority=n, output=3) for n in range(1500)]
    )
    policy = simulation.scheduler._policy
    for kept in (policy._counters, policy._least_served, policy._last_left):
        assert len(kept) < 1100
    assert not policy._waiting
