"""Documents whose KV is taken over: what is computed, once for whom, and that blocks are kept."""

import random
from dataclasses import replace

import pytest
from tests.fakes import FakeExecutor
from tests.scheduler.test_scheduler import expected_output, make, request, run, run_ahead

from ridgeline.core.kv_reuse import ReusedRange, reused_ranges
from ridgeline.core.request import FinishReason
from ridgeline.core.rounding import ceil_div
from ridgeline.scheduler import Scheduler


def documents(count, rng=None):
    rng = rng or random.Random(0)
    return [[rng.randrange(1000) for _ in range(rng.randint(9, 14))] for _ in range(count)]


def asked(number, parts, *, reuse=2, key=b"k", head=(1, 2, 3), **params):
    """A request whose prompt is a head, documents, each with a token behind it, and a question."""
    prompt, ranges = list(head), []
    for part in parts:
        ranges.append((len(prompt), len(prompt) + len(part)))
        prompt += [*part, 7]
    prompt += [5, number]
    taken = reused_ranges(ranges, reuse, num_prompt_tokens=len(prompt), block_tokens=4)
    return replace(request(number, prompt, cache_key=key, **params), reused=taken)


def computed(executor):
    return sum(plan.num_tokens for plan in executor.plans)


def finish(scheduler, executor, a_request):
    """Tokens that were computed for a request alone, and its sequence."""
    before = computed(executor)
    (sequence,) = scheduler.add(a_request)
    run(scheduler, executor)
    assert sequence.output_token_ids == expected_output(a_request, 0, 64)
    return computed(executor) - before, sequence


def test_of_a_document_the_first_tokens_and_what_fills_no_block_are_computed():
    found = reused_ranges([(30, 41), (3, 14)], 2, num_prompt_tokens=41, block_tokens=4)
    assert found == (ReusedRange(3, 5, 11), ReusedRange(30, 32, 38))
    assert reused_ranges([(3, 14)], 8, num_prompt_tokens=20, block_tokens=4) == ()
    assert reused_ranges([(3, 14)], "all", num_prompt_tokens=20, block_tokens=4) == ()
    # The prompt's last token is always computed.
    (last,) = reused_ranges([(0, 8)], 0, num_prompt_tokens=8, block_tokens=4)
    assert last.stop == 4


def test_documents_that_take_longer_than_kv_lives_are_computed_once():
    now_s = 0.0
    config = make(kv_ttl_s=1.0, max_num_batched_tokens=4).config
    scheduler, executor = Scheduler(config, clock=lambda: now_s), FakeExecutor()
    asking = asked(0, documents(3), max_tokens=1)
    scheduler.add(asking)
    while (plan := scheduler.schedule()) is not None and len(executor.plans) < 60:
        scheduler.update(plan, executor.submit(plan).result())
        scheduler.check_integrity()
        now_s += 0.6
    assert plan is None
    assert computed(executor) == len(asking.prompt_token_ids) + 6  # of each document two again


def test_documents_are_held_for_whoever_is_overtaken_when_they_are_there():
    now_s = 0.0
    config = make(kv_ttl_s=1.0, max_num_seqs=1, scheduling_policy="edf").config
    scheduler, executor = Scheduler(config, clock=lambda: now_s), FakeExecutor()
    asking = asked(0, documents(1), max_tokens=1)
    scheduler.add(asking)
    plan = scheduler.schedule()  # of the document
    scheduler.add(replace(request(1, range(9)), deadline_s=1000.0))
    while plan is not None:
        scheduler.update(plan, executor.submit(plan).result())
        scheduler.check_integrity()
        now_s += 0.6
        plan = scheduler.schedule()
    assert len(executor.plans) > 8
    assert (
        computed(executor) == len(asking.prompt_token_ids) + 2 + 9 + 7
    )  # of the document two again


def test_documents_are_taken_over_in_another_order_and_computed_once():
    scheduler, executor = make(), FakeExecutor()
    parts = documents(3)
    first = asked(0, parts, max_tokens=1)
    num_taken = sum(each.stop - each.start for each in first.reused)
    by_themselves = sum(each.stop - each.first for each in first.reused)
    length = len(first.prompt_token_ids)
    num_computed, sequence = finish(scheduler, executor, first)
    assert num_computed == by_themselves + length - num_taken
    assert sequence.num_cached_tokens == 0
    again = asked(1, parts[::-1], max_tokens=1)
    num_computed, sequence = finish(scheduler, executor, again)
    assert num_computed == length - num_taken
    assert sequence.num_cached_tokens == num_taken
    reuses = [each for plan in executor.plans for s in plan.passes[0].segments for each in s.reuses]
    assert [each.num_tokens for each in reuses[-3:]] == [r.stop - r.start for r in again.reused]


def test_documents_are_held_until_they_are_taken_over_and_no_longer():
    scheduler, executor = make(), FakeExecutor()
    (sequence,) = scheduler.add(asked(0, documents(3), max_tokens=4))
    (pool,) = scheduler.prefix_cache.pools
    num_held = []

    def each_step():
        if sequence.num_output_tokens and not sequence.is_finished:
            num_held.append(pool.num_blocks - pool.num_free)
            assert num_held[-1] == ceil_div(len(sequence.token_ids) - 1, 4)

    run(scheduler, executor, each_step=each_step)
    assert len(num_held) == 3


def test_two_who_wait_for_a_document_have_it_computed_once():
    scheduler, executor = make(max_num_batched_tokens=6), FakeExecutor()
    parts = documents(2)
    requests = [asked(number, parts, max_tokens=1) for number in range(2)]
    sequences = [scheduler.add(each)[0] for each in requests]
    run(scheduler, executor)
    for each, sequence in zip(requests, sequences, strict=True):
        assert sequence.output_token_ids == expected_output(each, 0, 64)
    by_themselves = sum(each.stop - each.first for each in requests[0].reused)
    admitted = [a.token_ids for plan in executor.plans for a in plan.admissions]
    assert sum(len(tokens) for tokens in admitted if len(tokens) < 20) == by_themselves


@pytest.mark.parametrize("other", [{"key": b"other"}, {"reuse": 3}])
def test_what_is_computed_behind_documents_is_shared_by_those_who_take_the_same(other):
    scheduler, executor = make(), FakeExecutor()
    parts = documents(3)
    finish(scheduler, executor, asked(0, parts, max_tokens=1))
    same, sequence = finish(scheduler, executor, asked(0, parts, max_tokens=1))
    assert sequence.num_cached_tokens == (len(sequence.token_ids) - 2) // 4 * 4
    assert same <= 4
    num_computed, _ = finish(scheduler, executor, asked(0, parts, max_tokens=1, **other))
    assert num_computed > same + 3
    plain = replace(asked(0, parts, max_tokens=1), reused=())
    assert finish(scheduler, executor, plain)[0] == len(plain.prompt_token_ids)


@pytest.mark.parametrize("key", [b"other tenant", b"other adapter"])
def test_documents_are_of_one_tenant_and_one_adapter(key):
    scheduler, executor = make(), FakeExecutor()
    parts = documents(2)
    first, _ = finish(scheduler, executor, asked(0, parts, max_tokens=1))
    again, sequence = finish(scheduler, executor, asked(0, parts, max_tokens=1, key=key))
    assert (first, sequence.num_cached_tokens) == (again, 0)


def test_documents_of_a_deleted_tenant_are_gone():
    scheduler, executor = make(), FakeExecutor()
    parts, tenant = documents(2), "a tenant"
    first, _ = finish(scheduler, executor, replace(asked(0, parts, max_tokens=1), tenant=tenant))
    scheduler.delete_tenant(tenant)
    again = replace(asked(0, parts[::-1], max_tokens=1), tenant=tenant)
    assert finish(scheduler, executor, again)[0] == first


@pytest.mark.parametrize("step", range(5))
def test_whoever_is_aborted_leaves_no_document_behind_that_nobody_wants(step):
    scheduler, executor = make(max_num_batched_tokens=5), FakeExecutor()
    parts = documents(2)
    sequences = [scheduler.add(asked(n, parts[: 2 - n], max_tokens=2))[0] for n in range(2)]
    for _ in range(step):
        plan = scheduler.schedule()
        scheduler.update(plan, executor.submit(plan).result())
    scheduler.finish(sequences[0], FinishReason.ABORT)
    scheduler.check_integrity()
    kept = asked(1, parts[:1], max_tokens=2)
    run(scheduler, executor)
    assert sequences[1].output_token_ids == expected_output(kept, 0, 64)
    scheduler.finish(sequences[1], FinishReason.ABORT)
    assert not scheduler.has_work
    assert scheduler.num_waiting == scheduler.num_running == 0


def test_an_abort_while_a_document_runs_ends_it():
    scheduler, executor = make(max_num_batched_tokens=3), FakeExecutor()
    (sequence,) = scheduler.add(asked(0, documents(1)))
    plan = scheduler.schedule()
    scheduler.update(plan, executor.submit(plan).result())
    assert scheduler.num_running == 1
    scheduler.finish(sequence, FinishReason.ABORT)
    assert scheduler.schedule() is None
    assert scheduler.num_running == 0
    scheduler.check_integrity()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_random_workloads_in_a_small_pool(seed, max_in_flight, policy):
    """Little more room than one prompt and its documents take: outputs are as if each ran alone."""
    rng = random.Random(seed)
    scheduler = make(
        num_blocks=(30,),
        max_num_batched_tokens=rng.choice([3, 7, 64]),
        max_in_flight=max_in_flight,
        scheduling_policy=policy,
    )
    executor = FakeExecutor(max_in_flight=max_in_flight)
    parts = documents(5, rng)
    pending = [
        replace(
            asked(
                number,
                rng.sample(parts, rng.randint(0, 3)),
                reuse=rng.choice([0, 2, 5, "all"]),
                key=rng.choice([b"a", b"b"]),
                n=rng.choice([1, 1, 3]),
                max_tokens=rng.choice([1, 5, 12]),
            ),
            tenant=rng.choice(["x", "y"]),
        )
        for number in range(8)
    ]
    requests, sequences = list(pending), []

    def arrive():
        while pending and rng.random() < 0.5:
            sequences.extend(scheduler.add(pending.pop(0)))

    while pending or scheduler.has_work:
        arrive()
        (run if max_in_flight == 1 else run_ahead)(scheduler, executor, each_step=arrive)
    assert len(sequences) == sum(each.params.n for each in requests)
    for sequence in sequences:
        expected = expected_output(sequence.request, sequence.sample_index, 64)
        assert sequence.output_token_ids == expected
