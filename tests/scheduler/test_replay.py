"""Decode steps that are run in one go change nothing but the number of plans."""

import random
from dataclasses import replace

import pytest
from tests.fakes import FakeExecutor

from ridgeline import LLM, SamplingParams
from ridgeline.core.request import FinishReason, Request
from ridgeline.core.rounding import ceil_div
from ridgeline.engine.loop import EngineLoop
from ridgeline.scheduler import Scheduler, SchedulerConfig
from ridgeline.scheduler.replay import MAX_REPLAY_STEPS, Replay


def run(
    requests, *, replay_s, seed=0, shorten=None, num_blocks=40, windows=(None,), max_in_flight=2
):
    """Outputs and ends of requests that come and go at random, and the executor."""
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        num_blocks=(num_blocks,) * len(windows),
        windows=windows,
        block_tokens=4,
        replay_s=replay_s,
        max_in_flight=max_in_flight,
    )
    executor = FakeExecutor(windows=windows, max_in_flight=max_in_flight)
    scheduler = Scheduler(config)
    if shorten is not None:
        executor.shorten, executor.may_be_void = shorten, True
    loop = EngineLoop(executor, scheduler, None)
    rng, waiting, states = random.Random(seed), list(requests), []
    while waiting or loop.has_work:
        if waiting and (rng.random() < 0.1 or not loop.has_work):
            states.append(loop.add(waiting.pop()))
        loop.step()
        loop.check_integrity()
    for pool in scheduler.prefix_cache.pools:
        assert pool.num_free == num_blocks
    outputs = {state.request.request_id: state.output().outputs for state in states}
    return outputs, executor


def make_requests(seed, count=8):
    rng = random.Random(seed)
    return [
        Request(
            request_id=number,
            prompt_token_ids=tuple(rng.randrange(5) for _ in range(rng.randint(1, 20))),
            params=SamplingParams(
                max_tokens=rng.randint(1, 40),
                n=rng.choice([1, 1, 2]),
                stop_token_ids=(rng.randrange(11),) if rng.random() < 0.3 else (),
            ),
            seed=number,
            cache_key=b"k",
        )
        for number in range(count)
    ]


def longest(executor):
    return max(a_pass.num_steps for plan in executor.plans for a_pass in plan.passes)


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
@pytest.mark.parametrize("num_blocks", [18, 40])
@pytest.mark.parametrize("max_in_flight", [2, 4])
def test_replayed_equals_stepped(windows, num_blocks, max_in_flight):
    longest_of_seeds = []
    for seed in range(12):
        requests = make_requests(seed)
        fields = {"seed": seed, "windows": windows, "num_blocks": num_blocks}
        expected, _ = run(requests, replay_s=0.0, **fields)
        outputs, executor = run(requests, replay_s=10.0, max_in_flight=max_in_flight, **fields)
        assert outputs == expected
        longest_of_seeds.append(longest(executor))
    assert min(longest_of_seeds) > (3 if max_in_flight == 2 else 1)
    assert max(longest_of_seeds) > 3


@pytest.mark.parametrize("max_in_flight", [2, 4])
def test_a_replay_that_comes_short_is_taken_up_again(max_in_flight):
    for seed in range(12):
        rng = random.Random(seed)
        requests = make_requests(seed)
        expected, _ = run(requests, replay_s=0.0, seed=seed)
        outputs, executor = run(
            requests,
            replay_s=10.0,
            seed=seed,
            shorten=lambda most, rng=rng: rng.randint(1, most),
            max_in_flight=max_in_flight,
        )
        assert outputs == expected
        assert longest(executor) > 4


def test_nothing_is_planned_on_top_of_what_a_short_replay_made_void():
    config = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, num_blocks=(16,),
        windows=(None,), block_tokens=4, replay_s=10.0, max_in_flight=2,
    )  # fmt: skip
    executor, scheduler = FakeExecutor(max_in_flight=2), Scheduler(config)
    executor.shorten, executor.may_be_void = (lambda most: min(most, 2)), True
    scheduler.add(replace(make_requests(0)[0], params=SamplingParams(max_tokens=40)))
    flights, num_short = [], 0
    while scheduler.has_work:
        while len(flights) < 2 and (plan := scheduler.schedule()) is not None:
            flights.append((plan, executor.submit(plan).result()))
        plan, result = flights.pop(0)
        scheduler.update(plan, result)
        (tokens,) = (each.token_ids for each in result.passes[0])
        if flights and 0 < len(tokens) < plan.passes[0].num_steps:
            num_short += 1
            assert scheduler.schedule() is None
    assert num_short > 1


@pytest.mark.parametrize("length", range(1, 6))
def test_a_replay_holds_the_blocks_that_it_writes_and_no_more(length):
    config = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, num_blocks=(16,),
        windows=(None,), block_tokens=4, replay_s=10.0,
    )  # fmt: skip
    executor, scheduler = FakeExecutor(), Scheduler(config)
    scheduler.add(replace(make_requests(0)[0], prompt_token_ids=(1,) * length, cache_key=None))
    (pool,) = scheduler.prefix_cache.pools
    while (plan := scheduler.schedule()) is not None:
        (segment,) = plan.passes[0].segments
        written = segment.stop + plan.passes[0].num_steps - 1
        assert pool.num_blocks - pool.num_free == ceil_div(written, 4)
        scheduler.update(plan, executor.submit(plan).result())
    assert longest(executor) > 4


def run_queue(requests, replay_s=10.0):
    """More requests than seats, all there at the start: outputs, and plans made while some wait."""
    config = SchedulerConfig(
        max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, num_blocks=(64,),
        windows=(None,), block_tokens=4, replay_s=replay_s,
    )  # fmt: skip
    executor, scheduler = FakeExecutor(), Scheduler(config)
    loop = EngineLoop(executor, scheduler, None)
    states = [loop.add(request) for request in requests]
    plans = []
    while loop.has_work:
        had_waiting, before = scheduler.num_waiting > 0, len(executor.plans)
        loop.step()
        loop.check_integrity()
        if had_waiting and scheduler.num_waiting:
            plans += executor.plans[before:]
    outputs = {state.request.request_id: state.output().outputs for state in states}
    return outputs, plans


@pytest.mark.parametrize("end", [{"stop_token_ids": (3,)}, {"stop": ("t",)}], ids=["token", "text"])
def test_nothing_is_replayed_while_somebody_waits_for_an_output_that_may_end(end):
    params = SamplingParams(max_tokens=30, **end)
    requests = [replace(request, params=params) for request in make_requests(3, count=12)]
    _, plans = run_queue(requests)
    assert len(plans) > 50
    assert all(plan.passes[0].num_steps == 1 for plan in plans)


def test_outputs_that_end_at_their_length_are_replayed_whoever_waits():
    """Until the first is through, nobody could enter: all get in with the same step."""
    requests = [
        replace(request, params=replace(request.params, n=1, stop_token_ids=()))
        for request in make_requests(3, count=12)
    ]
    outputs, plans = run_queue(requests)
    assert 4 < max(plan.passes[0].num_steps for plan in plans) <= MAX_REPLAY_STEPS
    stepped, one_by_one = run_queue(requests, replay_s=0.0)
    assert outputs == stepped
    assert sum(p.passes[0].num_steps for p in plans) == len(one_by_one)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.1, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "min_tokens": 5},
        {"temperature": 0, "stop": ("t m",)},
    ],
)
def test_a_real_model_says_the_same(model_folder, fields):
    prompts = ["the cat", "a", "the mat sat on the cat on the mat"]
    params = SamplingParams(max_tokens=40, **fields)
    outputs = []
    for replay_s in (0.0, 100.0):
        settings = {"executor": "reference", "dtype": "float64", "block_tokens": 4}
        settings["decode_replay_s"] = replay_s
        with LLM(str(model_folder), **settings) as llm:
            llm.generate("warm", SamplingParams(max_tokens=4))
            generated = llm.generate(prompts, params)
            outputs.append([output.outputs[0] for output in generated])
    stepped, replayed = outputs
    for one, other in zip(stepped, replayed, strict=True):
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
        assert one.finish_reason is other.finish_reason is not FinishReason.ERROR
        assert (one.logprobs is None) == (other.logprobs is None)
        for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-9)


@pytest.mark.parametrize(("seconds", "expected"), [(0.008, 5), (0.0, 1)])
def test_replays_are_lengthened_only_while_asked_and_only_where_they_are_on(seconds, expected):
    _, executor = run(make_requests(0), replay_s=0.0)
    replay = Replay(seconds)
    for plan in executor.plans:
        replay.observe(plan, 0.01)
    before = replay.num_steps
    with replay.lengthened(0.0505):
        assert replay.num_steps == expected
    assert replay.num_steps == before == 1


@pytest.mark.parametrize(("most_s", "expected"), [(None, 5), (0.0305, 3), (0.005, 1)])
def test_a_replay_keeps_to_what_a_step_may_take(most_s, expected):
    _, executor = run(make_requests(0), replay_s=0.0)
    replay = Replay(0.0505, most_s=most_s)
    for plan in executor.plans:
        replay.observe(plan, 0.01)
    assert replay.num_steps == expected
    with replay.lengthened(1.0):
        assert replay.num_steps == (16 if most_s is None else expected)
