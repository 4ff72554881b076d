"""States of sequences beside KV: where they are saved, and found again, on an executor that asserts
that a state is that of the tokens before."""

import random

import pytest
from tests.fakes import FakeExecutor
from tests.scheduler.test_prefix_reuse import finish
from tests.scheduler.test_scheduler import expected_output, make, request, run, run_ahead

BLOCK = 4


def pair(*, num_states=64, num_blocks=64, **settings):
    scheduler = make(num_blocks=(num_blocks, num_states), windows=(None,), **settings)
    return scheduler, FakeExecutor(has_states=True)


def ask(scheduler, executor, prompt, **params):
    """Tokens that were computed for a prompt, and the output, which has to be right."""
    settings = {"cache_key": b"k", "max_tokens": 1} | params
    computed, output = finish(scheduler, executor, request(0, prompt, **settings))
    assert output == expected_output(request(0, prompt, **settings), 0, 64)
    return computed, output


def test_a_repeated_prompt_starts_from_the_checkpoint_at_its_end():
    for length, again in ((17, 1), (16, 4), (18, 2)):
        scheduler, executor = pair()
        assert ask(scheduler, executor, range(length))[0] == length
        assert ask(scheduler, executor, range(length))[0] == again


def test_the_next_turn_computes_what_is_new_and_less_than_a_block():
    scheduler, executor = pair()
    turn, computed = list(range(10)), 0
    for added in (11, 7, 5):
        computed, answer = ask(scheduler, executor, turn, max_tokens=added)
        turn += [*answer, 900, 901]
    # The last answer's last token, the two after it, a block before them at most, its own answer.
    assert computed <= 3 + BLOCK - 1 + 5


def test_of_an_output_one_checkpoint_stays():
    scheduler, executor = pair(max_model_len=64)
    ask(scheduler, executor, range(9), max_tokens=40)
    states = scheduler.prefix_cache.pools[1]
    assert states.num_cached == 2  # the prompt's end, the output's last
    assert ask(scheduler, executor, range(9))[0] == 1


def test_checkpoints_stay_every_so_many_tokens():
    scheduler, executor = pair(state_tokens=18)  # in whole blocks: 16
    ask(scheduler, executor, range(60))
    assert scheduler.prefix_cache.pools[1].num_cached == 3 + 1
    computed, _ = ask(scheduler, executor, [*range(40), *range(900, 910)])
    assert computed == 50 - 32


def test_where_two_prompts_part_the_third_starts():
    scheduler, executor = pair(max_num_batched_tokens=64)
    common = list(range(20))
    computed = [
        ask(scheduler, executor, [*common, *range(first, first + 9)])[0]
        for first in (100, 200, 300)
    ]
    assert computed == [29, 29, 9]


def test_without_a_checkpoint_kv_alone_is_no_hit():
    scheduler, executor = pair()
    ask(scheduler, executor, range(30))
    states = scheduler.prefix_cache.pools[1]
    states.release(states.allocate(states.num_free))  # evicts all checkpoints
    assert ask(scheduler, executor, range(30))[0] == 30


def test_samples_of_one_prompt_compute_it_once():
    scheduler, executor = pair(max_num_batched_tokens=64)
    sequences = scheduler.add(request(0, range(30), cache_key=b"k", n=3, max_tokens=6))
    run(scheduler, executor)
    for sample, sequence in enumerate(sequences):
        assert sequence.output_token_ids == expected_output(sequence.request, sample, 64)
    assert sum(plan.num_tokens for plan in executor.plans) == 30 + 2 * 2 + 3 * 5


def test_as_many_run_as_there_are_states():
    scheduler, executor = pair(num_states=2, max_num_batched_tokens=64)
    sequences = [
        scheduler.add(request(number, range(number, 9), max_tokens=6))[0] for number in range(3)
    ]
    seen = set()
    run(scheduler, executor, each_step=lambda: seen.add(scheduler.num_running))
    assert seen == {0, 1, 2}
    for sequence in sequences:
        assert sequence.output_token_ids == expected_output(sequence.request, 0, 64)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("cached", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("drive", [run, run_ahead])
def test_random_loads_in_small_pools(seed, cached, drive):
    """Chunks, preemption, hits, samples, replays and aborts, with few blocks and fewer states."""
    rng = random.Random(seed)
    scheduler, executor = pair(
        num_blocks=rng.choice([16, 20, 64]),
        num_states=rng.choice([2, 3, 5, 30]),
        max_num_batched_tokens=rng.choice([3, 7, 16, 64]),
        state_tokens=rng.choice([4, 8, 32]),
        replay_s=rng.choice([0.0, 100.0]),
    )
    executor.may_be_void = True
    executor.shorten = lambda num_steps: rng.randint(1, num_steps)
    common = [rng.randrange(1000) for _ in range(40)]
    pending = [
        request(
            number,
            common[: rng.randint(0, 40)] + [rng.randrange(1000) for _ in range(rng.randint(1, 20))],
            cache_key=b"tenant" if cached else None,
            n=rng.choice([1, 1, 3]),
            max_tokens=rng.choice([1, 5, 30, None]),
        )
        for number in range(8)
    ]
    sequences, aborted = [], set()

    def arrive():
        if pending and rng.random() < 0.5:
            sequences.extend(scheduler.add(pending.pop(0)))
        if sequences and rng.random() < 0.03:
            victim = rng.choice(sequences)
            if not victim.is_finished:
                scheduler.finish(victim, "abort")
                aborted.add(victim)

    for number in range(8, 14):
        while pending:
            arrive()
            drive(scheduler, executor, each_step=arrive)
        known = rng.choice(sequences).token_ids
        turn = [*known[: rng.randint(1, 50)], *range(rng.randint(1, 6))]
        key = b"tenant" if cached else None
        pending.append(request(number, turn, cache_key=key, max_tokens=rng.choice([1, 20])))
    arrive()
    drive(scheduler, executor, each_step=arrive)
    assert not scheduler.has_work
    for sequence in sequences:
        if sequence.finish_reason != "abort":
            expected = expected_output(sequence.request, sequence.sample_index, 64)
            assert sequence.output_token_ids == expected
