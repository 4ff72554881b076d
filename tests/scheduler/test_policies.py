"""What policies promise under load, on a virtual clock."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from tests.scheduler.simulation import PREDICTOR, TOKEN, Simulation, make_request

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import InvalidRequestError, OverloadedError, SettingsError
from ridgeline.core.request import FinishReason
from ridgeline.core.result import StepResult
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.scheduler import LinearPredictor
from ridgeline.scheduler.policies import FairShare
from ridgeline.scheduler.sequence import Sequence, SequenceUpdate


def poisson(rate, count, *, seed=0):
    rng, time_s, times = random.Random(seed), 0.0, []
    for _ in range(count):
        time_s += rng.expovariate(rate)
        times.append(time_s)
    return times


def capacity(**settings) -> float:
    """Requests per second of the default simulation when it never idles."""
    simulation = Simulation(**settings)
    simulation.run([make_request(number, 0.0) for number in range(400)])
    return 400 / simulation.now_s


def overloaded_with_deadlines(policy, *, seed, factor=1.3, count=800, **settings):
    rng = random.Random(seed)
    arrivals = [
        make_request(number, at, deadline_s=at + rng.uniform(0.5, 5.0))
        for number, at in enumerate(poisson(factor * capacity(), count, seed=seed))
    ]
    return Simulation(scheduling_policy=policy, **settings).run(arrivals)


@pytest.mark.parametrize("seed", range(3))
def test_deadlines_under_overload(seed):
    """At 1.3 × capacity, earliest deadline first meets at least 1.5 × what FCFS meets."""
    met = {
        policy: sum(r.met_its_deadline for r in overloaded_with_deadlines(policy, seed=seed))
        for policy in ("fcfs", "edf")
    }
    assert met["edf"] >= 1.5 * met["fcfs"]
    assert met["edf"] >= 0.6 * 800


def test_edf_postpones_but_serves_what_is_too_late():
    records = overloaded_with_deadlines("edf", seed=0, count=200)
    assert all(record.finished_s is not None for record in records)


def test_edf_does_not_take_a_limit_of_output_for_its_length():
    """Outputs that end at their first token meet deadlines that a thousand tokens would miss."""
    early = [make_request(n, 0.0, output=1000, eos_token_ids=(7,)) for n in range(60)]
    due = make_request(99, 2.0, output=1000, eos_token_ids=(7,), deadline_s=4.0)
    others = [make_request(100 + n, 2.0, output=60, deadline_s=30.0) for n in range(60)]
    records = Simulation(scheduling_policy="edf").run([*early, due, *others])
    (record,) = (each for each in records if each.request is due)
    assert record.met_its_deadline


def test_edf_with_a_wrong_price_is_still_better_than_fcfs():
    """The prediction is scaled by what steps really take, so an error of 30 × hardly matters."""
    believed = LinearPredictor(pass_s=0.3, token_s=0.015)
    met = sum(
        record.met_its_deadline
        for record in overloaded_with_deadlines("edf", seed=0, believed=believed)
    )
    assert met >= 0.55 * 800


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_fair_share_holds_when_one_tenant_floods(weight):
    """Both always have something waiting; service over half a minute is as their weights."""
    rng = random.Random(1)
    flood = [make_request(n, 0.0, tenant="flood", prompt=rng.randint(10, 300)) for n in range(4000)]
    steady = [
        make_request(10_000 + n, n * 0.02, tenant="steady", prompt=rng.randint(10, 300))
        for n in range(3000)
    ]
    simulation = Simulation(scheduling_policy="fair", tenant_weights={"steady": weight})
    simulation.run(flood + steady, until_s=30.0)
    service = Counter()
    for record in simulation.records.values():
        if record.times:
            cost = len(record.request.prompt_token_ids) + 2 * len(record.times)
            service[record.request.tenant] += cost
    assert service["steady"] / service["flood"] == pytest.approx(weight, rel=0.1)


def test_fair_share_counts_what_is_written():
    """Prompts are equal, and only the outputs of one tenant are long."""
    long = [make_request(n, 0.0, tenant="long", prompt=20, output=100) for n in range(2000)]
    short = [make_request(9000 + n, 0.0, tenant="short", prompt=20, output=5) for n in range(9000)]
    simulation = Simulation(scheduling_policy="fair")
    simulation.run(long + short, until_s=20.0)
    service = Counter()
    for record in simulation.records.values():
        if record.times:
            service[record.request.tenant] += 20 + 2 * len(record.times)
    assert service["short"] / service["long"] == pytest.approx(1, rel=0.1)


def test_a_tenant_below_its_share_is_served_at_once():
    flood = [make_request(number, 0.0, tenant="flood") for number in range(600)]
    light = [make_request(1000 + n, 1.0 + n, tenant="light") for n in range(10)]
    fair = Simulation(scheduling_policy="fair")
    fair.run(flood + light)
    waits = [fair.records[1000 + n].times[0] - (1.0 + n) for n in range(10)]
    assert max(waits) < 1.0  # until a slot is free
    fcfs = Simulation()
    fcfs.run(flood + light)
    assert fcfs.records[1000].times[0] > 10 * max(waits)


def test_idleness_earns_no_credit():
    """A tenant that comes back shares from then on, instead of catching up."""
    always = [make_request(n, 0.0, tenant="always") for n in range(3000)]
    late = [make_request(5000 + n, 20.0, tenant="late") for n in range(3000)]
    simulation = Simulation(scheduling_policy="fair")
    simulation.run(always + late, until_s=40.0)
    after = Counter(
        record.request.tenant
        for record in simulation.records.values()
        if record.times and record.times[0] > 20.0
    )
    assert after["late"] == pytest.approx(after["always"], rel=0.1)


def test_tenants_do_not_pile_up_in_memory():
    simulation = Simulation(scheduling_policy="fair")
    simulation.run([make_request(n, n * 0.05, tenant=f"tenant {n}", output=3) for n in range(3000)])
    assert len(simulation.scheduler._policy._counters) < 1500


def test_a_tenant_that_was_forgotten_has_the_rank_that_it_would_come_back_with():
    """It may run on, and so be asked who gives way."""
    policy, scheduler = FairShare(), Simulation(scheduling_policy="fair").scheduler
    waiting, *others = (
        scheduler.add(make_request(n, 0.0, tenant=f"tenant {n}", output=3))[0] for n in range(1100)
    )
    policy.entered(waiting)
    policy.charge_input(waiting, 100)
    for each in others:
        policy.entered(each)
        policy.left(each)
    assert len(policy._counters) < 1100
    assert {policy.lane_rank(each.lane) for each in (waiting, *others)} == {(100.0,)}


def test_a_tenant_is_charged_for_the_tokens_of_all_its_sequences_over_its_weight():
    """Sheng et al. 2024: a token of input counts once, one of output twice."""
    policy, scheduler = FairShare({"b": 4.0}), Simulation(scheduling_policy="fair").scheduler
    first, second, other = (
        scheduler.add(make_request(n, 0.0, tenant=tenant))[0] for n, tenant in enumerate("aab")
    )
    policy.charge_input(first, 5)
    outputs = ((first, (7, 7, 7)), (second, (7, 7)), (other, (7, 7)))
    policy.charge_outputs([SequenceUpdate(each, 0, tokens, TOKEN) for each, tokens in outputs])
    assert policy.lane_rank(first.lane) == policy.lane_rank(second.lane) == (5 + 2 * 5,)
    assert policy.lane_rank(other.lane) == (2 * 2 / 4,)


def test_priority_under_saturation():
    """A hundred low requests wait and all slots run low ones; a high one goes ahead of them all."""
    low = [make_request(n, 0.0, priority=5, output=400) for n in range(100)]
    high = [make_request(1000 + n, 3.0 * (n + 1), priority=0) for n in range(5)]
    simulation = Simulation(scheduling_policy="priority")
    simulation.run(low + high)
    for n in range(5):
        assert simulation.records[1000 + n].times[0] - 3.0 * (n + 1) < 0.1
    assert simulation.scheduler.num_preemptions == 5
    assert all(record.finished_s is not None for record in simulation.records.values())


def test_priority_takes_blocks_as_well():
    low = [make_request(n, 0.0, priority=1, prompt=100, output=100) for n in range(8)]
    high = make_request(99, 1.0, priority=-1, prompt=600, output=4)
    simulation = Simulation(
        scheduling_policy="priority", num_blocks=(110,), max_model_len=1000, max_num_seqs=32
    )
    simulation.run([*low, high])
    assert simulation.records[99].times[0] - 1.0 < 1.0
    assert all(record.finished_s is not None for record in simulation.records.values())


def test_priority_preempts_nobody_in_vain():
    """All blocks of the lower ones would not be enough."""
    high = make_request(0, 0.0, priority=0, prompt=900, output=100)
    low = [make_request(n, 0.0, priority=5, prompt=200, output=60) for n in (1, 2)]
    newcomer = make_request(9, 0.8, priority=0, prompt=700, output=4)
    simulation = Simulation(
        scheduling_policy="priority", num_blocks=(100,), max_model_len=1500, max_num_seqs=8
    )
    simulation.run([high, *low, newcomer])
    assert simulation.scheduler.num_preemptions == 0
    assert simulation.records[9].times[0] >= simulation.records[0].finished_s
    assert len(simulation.records[1].times) == 60


def test_prefixes_of_those_who_were_first_before_give_way():
    """A waiting sequence that lost its place at the head does not keep the cache from the next."""
    earlier = make_request(3, 0.0, priority=3, prompt=480, output=1, cache_key=b"key")
    running = make_request(0, 1.0, priority=0, prompt=600, output=200)
    waiting = make_request(1003, 2.0, priority=3, prompt=1000, output=1, cache_key=b"key")
    urgent = make_request(2, 2.5, priority=2, prompt=800, output=1)
    simulation = Simulation(scheduling_policy="priority", num_blocks=(100,), max_model_len=1500)
    simulation.run([earlier, running, waiting, urgent])
    assert simulation.records[2].finished_s < simulation.records[0].finished_s


def test_a_prompt_of_higher_priority_overtakes_one_that_is_being_computed():
    low = make_request(0, 0.0, priority=1, prompt=10_000, output=1)
    high = make_request(1, 0.5, priority=0, prompt=500, output=1)
    simulation = Simulation(scheduling_policy="priority")
    simulation.run([low, high])
    assert simulation.records[1].times[0] < simulation.records[0].times[0] / 2


@pytest.mark.parametrize("policy", ["fcfs", "fair", "edf", "priority"])
def test_a_full_queue_refuses_with_the_seconds_to_wait(policy):
    simulation = Simulation(scheduling_policy=policy, max_num_waiting=20)
    simulation.run([make_request(number, 0.01 * number) for number in range(400)])
    assert simulation.refused
    assert len(simulation.records) + len(simulation.refused) == 400
    assert all(record.finished_s is not None for record in simulation.records.values())
    # Who is told to wait so long would indeed find the queue empty of those before him.
    late = [seconds for request, seconds in simulation.refused if request.arrival_s > 2]
    assert max(late) <= 3 * 20 / capacity()
    assert min(late) >= 1.0


def test_a_refusal_under_fcfs_looks_at_nobody_who_waits(monkeypatch):
    scheduler = Simulation(max_num_waiting=50).scheduler
    for number in range(50):
        scheduler.add(make_request(number, 0.0))
    looked_at = []
    was_admitted = property(lambda sequence: looked_at.append(sequence))
    monkeypatch.setattr(Sequence, "was_admitted", was_admitted)
    with pytest.raises(OverloadedError):
        scheduler.add(make_request(99, 0.0))
    assert not looked_at


def test_counting_who_waits_takes_no_look_at_samples(monkeypatch):
    class Unread(dict):
        def values(self):
            raise AssertionError("a look at all samples")

    scheduler = Simulation().scheduler
    monkeypatch.setattr(scheduler._waiting, "_forks", Unread())
    samples = scheduler.add(make_request(0, 0.0, params=SamplingParams(n=4, max_tokens=2)))
    scheduler.add(make_request(1, 0.0, params=SamplingParams(n=3, max_tokens=2)))
    assert scheduler.num_waiting == 7
    scheduler.finish(samples[2], FinishReason.ABORT)
    assert scheduler.num_waiting == 6
    scheduler.finish(samples[0], FinishReason.ABORT)  # with it those that wait for its prompt
    assert scheduler.num_waiting == 3


def test_a_full_queue_gives_way_to_what_is_more_urgent():
    simulation = Simulation(scheduling_policy="priority", max_num_waiting=5, max_num_seqs=1)
    scheduler = simulation.scheduler
    scheduler.add(make_request(0, 0.0, output=1000))
    scheduler.schedule()
    low = [scheduler.add(make_request(n, 0.0, priority=9))[0] for n in range(1, 6)]
    scheduler.add(make_request(6, 0.0, priority=2))
    assert [each.finish_reason for each in low] == [None] * 4 + [FinishReason.SHED]
    with pytest.raises(OverloadedError) as refused:
        scheduler.add(make_request(7, 0.0, priority=9))
    assert refused.value.retry_after_s >= 1.0
    scheduler.check_integrity()


def test_who_was_shed_is_reported_once():
    simulation = Simulation(scheduling_policy="priority", max_num_waiting=1, max_num_seqs=1)
    shed = make_request(1, 0.001, priority=5)
    urgent = make_request(2, 0.002, priority=1)
    simulation.run([make_request(0, 0.0, output=50), shed, urgent])
    record = simulation.records[1]
    assert record.finished_s is None
    assert simulation.records[2].finished_s is not None


def test_the_cap_counts_samples():
    """Those that wait for the prompt of their request to be computed count, too."""
    scheduler = Simulation(max_num_waiting=10, max_num_seqs=4).scheduler
    many = SamplingParams(n=8, max_tokens=4)
    scheduler.add(make_request(0, 0.0, params=many))
    assert scheduler.num_waiting == 8
    with pytest.raises(OverloadedError, match=r"8 samples are waiting, 10 may, and .* has 8"):
        scheduler.add(make_request(1, 0.0, params=many))
    scheduler.add(make_request(2, 0.0))
    scheduler.add(make_request(3, 0.0))
    with pytest.raises(OverloadedError, match="10 samples are waiting"):
        scheduler.add(make_request(4, 0.0))
    scheduler.check_integrity()


def test_more_samples_than_may_ever_wait():
    scheduler = Simulation(max_num_waiting=10).scheduler
    with pytest.raises(InvalidRequestError, match=r"11 samples .* at most 10 may wait"):
        scheduler.add(make_request(0, 0.0, params=SamplingParams(n=11, max_tokens=4)))
    assert not scheduler.has_work


def test_samples_share_the_prompt_until_they_run():
    scheduler = Simulation(max_num_seqs=2).scheduler
    samples = scheduler.add(make_request(0, 0.0, params=SamplingParams(n=6, max_tokens=4)))
    assert len({id(sample.token_ids) for sample in samples}) == 1
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult(step_id=plan.step_id, passes=((TOKEN,),)))
    scheduler.schedule()
    assert [sample.num_output_tokens for sample in samples] == [1, 0, 0, 0, 0, 0]
    assert samples[1].slot is not None
    assert len({id(sample.token_ids) for sample in samples}) == 3  # two run, four wait


def test_samples_are_shed_with_their_request_only_where_that_makes_room():
    simulation = Simulation(scheduling_policy="priority", max_num_waiting=6)
    scheduler, three = simulation.scheduler, SamplingParams(n=3, max_tokens=4)
    low = scheduler.add(make_request(0, 0.0, params=three, priority=9))
    middle = scheduler.add(make_request(1, 0.0, params=three, priority=5))
    with pytest.raises(OverloadedError):  # three places of six are not enough
        scheduler.add(make_request(2, 0.0, params=SamplingParams(n=4, max_tokens=4), priority=7))
    assert not any(each.is_finished for each in (*low, *middle))
    scheduler.add(make_request(3, 0.0, priority=7))
    assert {each.finish_reason for each in low} == {FinishReason.SHED}
    assert {each.finish_reason for each in middle} == {None}
    assert scheduler.num_waiting == 4
    scheduler.check_integrity()


def test_a_full_queue_takes_places_from_the_tenant_with_the_most_waiting():
    """Not from one that was served more, and has one place only."""
    simulation = Simulation(scheduling_policy="fair", max_num_waiting=51, max_num_seqs=1)
    scheduler = simulation.scheduler
    simulation.run([make_request(n, 0.0, tenant="served") for n in range(3)])
    flood = [scheduler.add(make_request(100 + n, 0.0, tenant="flood"))[0] for n in range(50)]
    (served,) = scheduler.add(make_request(10, 0.0, tenant="served"))
    for n in range(24):
        scheduler.add(make_request(200 + n, 0.0, tenant="new"))
    assert served.finish_reason is None
    shed = [each for each in flood if each.finish_reason is FinishReason.SHED]
    assert shed == flood[-24:]
    scheduler.add(make_request(300, 0.0, tenant="new"))  # 26 of one, 24 of the other
    with pytest.raises(OverloadedError):
        scheduler.add(make_request(301, 0.0, tenant="new"))
    scheduler.check_integrity()


def test_retry_after_leaves_out_the_time_when_nobody_waits():
    """One request a minute, then a burst: the queue drains as fast as ever."""
    waits = []
    for start_s in (0.0, 600.0):
        lone = [make_request(900 + n, 60.0 * n) for n in range(int(start_s // 60))]
        burst = [make_request(n, start_s + 0.01 * n) for n in range(100)]
        simulation = Simulation(max_num_waiting=20)
        simulation.run([*lone, *burst])
        waits.append(max(seconds for _, seconds in simulation.refused))
    assert waits[1] == pytest.approx(waits[0], rel=0.5)


def test_steps_stay_within_the_slo_while_somebody_decodes():
    """An 8k prompt comes in beside decodes: the longest step that they see."""
    decodes = [make_request(n, 0.0, prompt=32, output=600) for n in range(4)]
    long = make_request(9, 2.0, prompt=8000, output=4)
    longest = {}
    for slo in (None, 0.05):
        simulation = Simulation(tpot_slo_s=slo, max_num_batched_tokens=8192)
        records = simulation.run([*decodes, long])
        times = records[0].times
        longest[slo] = max(b - a for a, b in pairwise(times))
        assert all(record.finished_s is not None for record in records)
    assert longest[None] > 4.0
    assert longest[0.05] <= 0.055


def test_the_slo_does_not_slow_prompts_that_nobody_waits_beside():
    simulation = Simulation(tpot_slo_s=0.05, max_num_batched_tokens=8192)
    simulation.run([make_request(0, 0.0, prompt=8000, output=2)])
    assert len(simulation.steps) == 2


def test_an_slo_that_cannot_be_met_stops_nothing():
    arrivals = [make_request(n, 0.1 * n, prompt=200) for n in range(30)]
    simulation = Simulation(tpot_slo_s=0.001)
    assert all(record.finished_s is not None for record in simulation.run(arrivals))


def trace(count=80):
    """Output lengths from 10 to 1,000, as in the comparison of Orca and of vLLM with static."""
    rng = random.Random(3)
    return [
        make_request(n, 0.0, prompt=rng.randint(10, 60), output=int(10 * 100 ** rng.random()))
        for n in range(count)
    ]


def test_continuous_batching_against_static_and_one_at_a_time():
    seconds = {}
    for name, settings in {
        "one": {"max_num_seqs": 1},
        "static": {"max_num_seqs": 32, "batching": "static"},
        "dynamic": {"max_num_seqs": 32, "batching": "dynamic", "batch_window_s": 0.1},
        "continuous": {"max_num_seqs": 32},
    }.items():
        simulation = Simulation(**settings)
        assert all(record.finished_s for record in simulation.run(trace()))
        seconds[name] = simulation.now_s
    assert seconds["static"] == pytest.approx(seconds["dynamic"], rel=0.01)  # all wait at the start
    assert seconds["continuous"] < seconds["static"] < seconds["one"]


def test_nobody_joins_a_static_batch():
    simulation = Simulation(batching="static", max_num_seqs=4)
    early = [make_request(n, 0.0, output=10 + 40 * n) for n in range(3)]
    late = make_request(9, 0.01, output=5)
    records = {r.request.request_id: r for r in simulation.run([*early, late])}
    assert records[9].times[0] > max(records[n].finished_s for n in range(3))


def test_a_dynamic_batch_starts_when_full_or_after_the_window():
    simulation = Simulation(batching="dynamic", batch_window_s=0.5, max_num_seqs=3)
    records = simulation.run([make_request(n, 0.1 * n, output=1) for n in range(3)])
    first = [record.times[0] for record in records]
    assert max(first) == min(first)
    assert 0.2 < first[0] < 0.4  # full when the third has come
    simulation = Simulation(batching="dynamic", batch_window_s=0.5, max_num_seqs=3)
    records = simulation.run([make_request(n, 0.1 * n, output=1) for n in range(2)])
    assert 0.5 < records[0].times[0] < 0.7


def test_the_window_of_a_batch_begins_with_the_first_arrival_whoever_is_next():
    first = make_request(0, 0.0, output=1, priority=5)
    urgent = make_request(1, 0.4, output=1, priority=0)
    simulation = Simulation(
        scheduling_policy="priority", batching="dynamic", batch_window_s=0.5, max_num_seqs=8
    )
    records = simulation.run([first, urgent])
    assert all(0.5 < record.times[0] < 0.7 for record in records)


def test_samples_fill_a_dynamic_batch():
    simulation = Simulation(batching="dynamic", batch_window_s=5.0, max_num_seqs=4)
    four = make_request(0, 0.0, params=SamplingParams(n=4, max_tokens=2))
    (record,) = simulation.run([four])
    assert len(record.times) == 8
    assert max(record.times) < 1.0


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_nobody_joins_a_batch_in_the_places_of_samples(batching):
    simulation = Simulation(batching=batching, batch_window_s=0.1, max_num_seqs=8)
    samples = [
        make_request(n, 0.0, params=SamplingParams(n=3, max_tokens=20 + 20 * n)) for n in range(2)
    ]
    late = make_request(9, 0.15, output=2)
    records = {record.request.request_id: record for record in simulation.run([*samples, late])}
    assert records[9].times[0] > max(records[1].times)


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_batches_survive_preemption_and_samples(batching):
    simulation = Simulation(
        batching=batching, batch_window_s=0.01, num_blocks=(40,), max_model_len=300
    )
    arrivals = [make_request(n, 0.0, prompt=100, output=150) for n in range(6)]
    records = simulation.run(arrivals)
    assert all(len(record.times) == 150 for record in records)
    assert simulation.scheduler.num_preemptions > 0


def test_settings_are_checked():
    for wrong in (
        {"scheduling_policy": "lottery"},
        {"batching": "sometimes"},
        {"batch_window_s": -1.0},
        {"tpot_slo_s": 0.0},
        {"max_num_waiting": 0},
        {"tenant_weights": {"a": 0.0}},
        {"tenant_weights": {"a": "much"}},
        {"kv_ttl_s": float("nan")},
    ):
        with pytest.raises(SettingsError):
            EngineConfig(**wrong)
    fair = EngineConfig(scheduling_policy="fair", tenant_weights={"a": "2"})
    assert fair.tenant_weights == {"a": 2.0}


def test_the_linear_price_is_the_sum_of_its_parts():
    simulation = Simulation()
    simulation.scheduler.add(make_request(0, 0.0, prompt=100))
    plan = simulation.scheduler.schedule()
    pairs = 100 * 101 / 2
    assert PREDICTOR.seconds(plan) == pytest.approx(0.010 + 100 * 0.0005 + pairs * 1e-8)
