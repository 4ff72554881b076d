"""Scheduling decisions and their effect on outputs, on an executor that notices wrong blocks."""

import random
from types import SimpleNamespace

import pytest
from tests.fakes import FakeExecutor, next_token

from ridgeline.core.errors import ContextLengthError
from ridgeline.core.plan import is_reference, plans_back
from ridgeline.core.request import FinishReason, Request
from ridgeline.core.rounding import ceil_div
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.scheduler import Scheduler, SchedulerConfig, Speculation

CONFIG = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "num_blocks": (64,),
    "block_tokens": 4,
}


def make(**changes) -> Scheduler:
    settings = {**CONFIG, **changes}
    settings.setdefault("windows", (None,) * len(settings["num_blocks"]))
    return Scheduler(SchedulerConfig(**settings))


def request(number, prompt, *, cache_key=None, **params) -> Request:
    settings = {"max_tokens": 8} | params
    return Request(
        request_id=number,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**settings),
        seed=number,
        cache_key=cache_key,
    )


def expected_output(
    a_request: Request, sample_index: int, limit: int, window: int = 1000
) -> list[int]:
    tokens = list(a_request.prompt_token_ids)
    while len(tokens) < limit:
        tokens.append(next_token(tokens[-window:], a_request.seed, sample_index))
        if len(tokens) - len(a_request.prompt_token_ids) == a_request.params.max_tokens:
            break
    return tokens[len(a_request.prompt_token_ids) :]


def run(scheduler, executor, *, each_step=lambda: None) -> int:
    steps = 0
    while (plan := scheduler.schedule()) is not None:
        result = executor.submit(plan).result()
        scheduler.update(plan, result)
        scheduler.check_integrity()
        each_step()
        steps += 1
    return steps


def run_ahead(scheduler, executor, *, each_step=lambda: None) -> int:
    """The same with steps planned before the outcomes of those before them are known."""
    steps, flights = 0, []
    while True:
        plan = scheduler.schedule()
        if plan is not None:
            flights.append((plan, executor.submit(plan).result()))
            scheduler.check_integrity()
            steps += 1
        elif not flights:
            return steps
        if len(flights) == scheduler.config.max_in_flight or plan is None:
            scheduler.update(*flights.pop(0))
            scheduler.check_integrity()
            each_step()


def test_prefill_is_cut_to_the_budget_and_decodes_go_first():
    scheduler, executor = make(max_num_batched_tokens=10), FakeExecutor()
    (first,) = scheduler.add(request(0, range(4)))
    scheduler.add(request(1, range(30)))
    run(scheduler, executor)
    sizes = [[s.num_tokens for s in plan.passes[0].segments] for plan in executor.plans]
    assert sizes[:5] == [[4, 6], [1, 9], [1, 9], [1, 6], [1, 1]]
    assert first.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(each, marks=pytest.mark.slow) for each in range(6, 20))]
)
@pytest.mark.parametrize("windows", [(None,), (9,), (None, 5, 17)], ids=str)
@pytest.mark.parametrize("cached", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize(("max_in_flight", "num_stages"), [(1, 1), (2, 1), (4, 1), (3, 2)])
def test_random_workloads_under_preemption(seed, windows, cached, max_in_flight, num_stages):
    """A pool that holds little more than one sequence: outputs are as if each ran alone.

    Prompts share prefixes; with the cache on they reuse each other's blocks within two tenants.
    """
    rng = random.Random(seed)
    scheduler = make(
        num_blocks=(18,) * len(windows),
        windows=windows,
        max_num_batched_tokens=rng.choice([3, 7, 64]),
        max_in_flight=max_in_flight,
        num_stages=num_stages,
    )
    executor = FakeExecutor(windows=windows, max_in_flight=max_in_flight)
    common = [rng.randrange(1000) for _ in range(40)]
    pending = [
        request(
            number,
            common[: rng.randint(0, 40)] + [rng.randrange(1000) for _ in range(rng.randint(1, 10))],
            cache_key=rng.choice([b"tenant a", b"tenant b"]) if cached else None,
            n=rng.choice([1, 1, 2, 5]),
            max_tokens=rng.choice([1, 5, 30, None]),
        )
        for number in range(8)
    ]
    requests, sequences = list(pending), []

    def arrive():
        if pending and rng.random() < 0.5:
            sequences.extend(scheduler.add(pending.pop(0)))

    while pending or scheduler.has_work:
        arrive()
        run_ahead(scheduler, executor, each_step=arrive)
    assert len(sequences) == sum(r.params.n for r in requests)
    for sequence in sequences:
        limit = scheduler.config.max_model_len
        window = 1000 if None in windows else max(windows)
        assert sequence.output_token_ids == expected_output(
            sequence.request, sequence.sample_index, limit, window
        )
    assert not scheduler.num_running
    assert not scheduler.num_waiting
    stats = scheduler.prefix_cache.stats
    assert (stats.hit_tokens > 0) is cached
    if windows == (None,) and seed == 0:
        assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("num_sequences", [1, 2, 5, 12])
def test_the_plans_in_a_pipeline_decode_other_sequences(num_sequences):
    """Each of those that its stages compute at once; one sequence alone is in all of them."""
    num_stages = 3
    settings = {"max_in_flight": num_stages + 1, "num_stages": num_stages, "max_num_seqs": 12}
    scheduler = make(num_blocks=(400,), max_num_batched_tokens=64, **settings)
    executor = FakeExecutor(max_in_flight=num_stages + 1)
    for number in range(num_sequences):
        scheduler.add(request(number, range(3), max_tokens=30))
    while scheduler.has_work:
        run_ahead(scheduler, executor)
    steady = [
        {segment.slot for segment in plan.passes[0].segments} for plan in executor.plans[6:30]
    ]
    share = ceil_div(num_sequences, num_stages)
    assert {len(slots) for slots in steady} <= {share, share - 1, num_sequences % share or share}
    if num_sequences >= num_stages:
        for first, second, third in zip(steady, steady[1:], steady[2:], strict=False):
            assert not first & second | first & third | second & third


def test_a_sequence_that_misses_a_step_builds_on_the_plan_before_it():
    """Steps have tokens for two of three; the first waits for its results, for a grammar."""
    grammar = SimpleNamespace(
        advance=lambda _: None,
        forced=lambda _: (),
        valid=lambda tokens, _: range(len(tokens)),
        is_complete=False,
    )
    settings = CONFIG | {"windows": (None,), "max_num_batched_tokens": 2, "max_in_flight": 4}
    scheduler = Scheduler(SchedulerConfig(**settings), Speculation())
    executor = FakeExecutor(max_in_flight=4)
    masked = request(0, range(1), max_tokens=20, structured_outputs={"regex": "a"})
    sequences = scheduler.add(masked, lambda: grammar)
    for number in (1, 2):
        sequences += scheduler.add(request(number, range(1), max_tokens=20))
    run_ahead(scheduler, executor)
    for sequence in sequences:
        assert sequence.output_token_ids == expected_output(sequence.request, 0, 64)
    tokens = [t for plan in executor.plans for s in plan.passes[0].segments for t in s.token_ids]
    assert {plans_back(token) for token in tokens if is_reference(token)} == {1, 2}


def test_samples_share_the_prompt():
    scheduler, executor = make(), FakeExecutor()
    scheduler.add(request(0, range(14), n=3, max_tokens=2))
    run(scheduler, executor)
    computed = sum(plan.num_tokens for plan in executor.plans)
    assert computed == 14 + 1 + 2 * (1 + 1)  # each fork computes the last prompt token again
    # Forks copy the partial block; whoever is its last holder writes in place.
    assert sum(len(plan.copies) for plan in executor.plans) == 2


@pytest.mark.parametrize("seed", range(20))
def test_abort_at_any_state_leaks_nothing_and_disturbs_nobody(seed):
    rng = random.Random(seed)
    scheduler, executor = make(num_blocks=(20,)), FakeExecutor()
    requests = [request(i, range(i, i + 12), n=rng.choice([1, 3]), max_tokens=20) for i in range(6)]
    groups = [scheduler.add(each) for each in requests]
    aborted = set()

    def maybe_abort():
        if rng.random() < 0.1:
            victim = rng.randrange(6)
            aborted.add(victim)
            for sequence in groups[victim]:
                scheduler.finish(sequence, FinishReason.ABORT)
            scheduler.check_integrity()

    maybe_abort()
    while (plan := scheduler.schedule()) is not None:
        result = executor.submit(plan).result()
        maybe_abort()  # while the step is in flight
        scheduler.update(plan, result)
        scheduler.check_integrity()
    for number, sequences in enumerate(groups):
        for sequence in sequences:
            expected = expected_output(sequence.request, sequence.sample_index, 64)
            if number in aborted:
                assert sequence.output_token_ids == expected[: sequence.num_output_tokens]
            else:
                assert sequence.output_token_ids == expected


def test_stop_tokens_end_a_sequence():
    scheduler, executor = make(), FakeExecutor()
    plain = expected_output(request(0, range(5)), 0, 64)
    for fields, reason in (({"stop_token_ids": (plain[2],)}, plain[2]), ({}, None)):
        base = request(0, range(5), **fields)
        eos = () if fields else (plain[2],)
        (sequence,) = scheduler.add(
            Request(
                request_id=0, prompt_token_ids=base.prompt_token_ids, params=base.params,
                seed=0, eos_token_ids=eos,
            )
        )  # fmt: skip
        run(scheduler, executor)
        assert sequence.output_token_ids == plain[:3]
        assert sequence.finish_reason is FinishReason.STOP
        assert sequence.stop_reason == reason


def test_what_cannot_fit_is_refused_with_the_numbers():
    scheduler = make()
    with pytest.raises(ContextLengthError, match="64 tokens and the context holds 64"):
        scheduler.add(request(0, range(64)))
    (sequence,) = scheduler.add(request(1, range(63), max_tokens=None))
    run(scheduler, FakeExecutor())
    assert sequence.num_output_tokens == 1


def test_a_scheduler_is_full_once_as_many_run_as_may():
    scheduler, executor = make(max_num_seqs=2), FakeExecutor()
    seen = []
    for number in range(4):
        scheduler.add(request(number, range(3), max_tokens=4 + number))
    run(
        scheduler,
        executor,
        each_step=lambda: seen.append((scheduler.num_running, scheduler.is_full)),
    )
    assert {is_full for count, is_full in seen if count < 2} == {False}
    assert {is_full for count, is_full in seen if count == 2} == {True}
    assert scheduler.num_tier_blocks == (0, 0)


def test_arrival_order_is_kept():
    scheduler, executor = make(max_num_seqs=1), FakeExecutor()
    groups = [scheduler.add(request(i, range(5), max_tokens=2)) for i in range(4)]
    order = []

    def note():
        for number, (sequence,) in enumerate(groups):
            if sequence.is_finished and number not in order:
                order.append(number)

    run(scheduler, executor, each_step=note)
    assert order == [0, 1, 2, 3]
