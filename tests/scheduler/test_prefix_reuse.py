"""What is reused, by whom, and how much of it."""

import pytest
from tests.fakes import FakeExecutor
from tests.scheduler.test_scheduler import expected_output, make, request, run

from ridgeline.kvcache import prefix_cache


def computed_tokens(executor) -> int:
    return sum(plan.num_tokens for plan in executor.plans)


def finish(scheduler, executor, a_request) -> tuple[int, list[int]]:
    """Run one request alone; tokens that were computed for it, and its output."""
    before = computed_tokens(executor)
    (sequence,) = scheduler.add(a_request)
    run(scheduler, executor)
    return computed_tokens(executor) - before, sequence.output_token_ids


def test_a_repeated_prompt_computes_its_last_block_only():
    scheduler, executor = make(), FakeExecutor()
    first, output = finish(scheduler, executor, request(0, range(17), cache_key=b"k", max_tokens=1))
    again, same = finish(scheduler, executor, request(0, range(17), cache_key=b"k", max_tokens=1))
    assert (first, again) == (17, 1)
    assert output == same
    # A prompt of whole blocks still computes one block, since its last token must be computed.
    assert finish(scheduler, executor, request(0, range(16), cache_key=b"k", max_tokens=1))[0] == 4


def test_output_is_reused_by_the_next_turn():
    scheduler, executor = make(), FakeExecutor()
    _, answer = finish(scheduler, executor, request(0, range(10), cache_key=b"k", max_tokens=11))
    turn = [*range(10), *answer, 5, 6, 7]
    computed, output = finish(scheduler, executor, request(0, turn, cache_key=b"k", max_tokens=1))
    assert computed == 24 - 20  # the last answer token was sampled but never computed
    assert output == expected_output(request(0, turn, max_tokens=1), 0, 64)


def test_two_at_once_reuse_what_the_first_has_computed():
    scheduler, executor = make(max_num_batched_tokens=8), FakeExecutor()
    scheduler.add(request(0, range(24), cache_key=b"k", max_tokens=1))
    (second,) = scheduler.add(request(1, range(24), cache_key=b"k", max_tokens=1))
    run(scheduler, executor)
    assert second.num_cached_tokens > 0
    assert second.output_token_ids == expected_output(second.request, 0, 64)


@pytest.mark.parametrize("keys", [(b"a", b"b"), (b"a", None), (None, b"a")])
def test_tenants_and_opted_out_requests_share_nothing(keys):
    scheduler, executor = make(), FakeExecutor()
    for number, key in enumerate(keys):
        a_request = request(number, range(20), cache_key=key, max_tokens=1)
        assert finish(scheduler, executor, a_request)[0] == 20
    assert scheduler.prefix_cache.stats.hit_tokens == 0


def test_a_hash_collision_is_a_miss(monkeypatch):
    """With a hash that is always equal, outputs stay right: a hit is verified."""
    monkeypatch.setattr(prefix_cache, "block_key", lambda *_: b"same")
    for windows in ((None,), (5,)):
        scheduler = make(windows=windows)
        executor = FakeExecutor(windows=windows)
        for number in range(20):
            prompt = [number % 3] * 4 + [number % 2] * 4 + [7] * 9
            key = bytes([number % 2])
            a_request = request(number, prompt, cache_key=key, max_tokens=3)
            expected = expected_output(a_request, 0, 64, windows[0] or 1000)
            assert finish(scheduler, executor, a_request)[1] == expected


def test_a_windowed_prefix_needs_only_what_the_window_sees():
    scheduler, executor = make(windows=(6,), num_blocks=(16,)), FakeExecutor(windows=(6,))
    finish(scheduler, executor, request(0, range(41), cache_key=b"k", max_tokens=1))
    pool = scheduler.prefix_cache.pools[0]
    pool.release(pool.allocate(13))  # evicts the oldest blocks: those far behind the window
    assert pool.num_cached == 3
    computed, _ = finish(scheduler, executor, request(0, range(41), cache_key=b"k", max_tokens=1))
    assert computed == 1


def test_a_window_holds_only_its_blocks():
    scheduler = make(windows=(8,), max_num_batched_tokens=4, max_num_seqs=1)
    executor, held = FakeExecutor(windows=(8,)), []
    (sequence,) = scheduler.add(request(0, range(40), max_tokens=20))
    run(
        scheduler,
        executor,
        each_step=lambda: held.append(sum(block >= 0 for block in sequence.kv.tables[0])),
    )
    assert max(held) <= 8 // 4 + 1
    assert sequence.output_token_ids == expected_output(sequence.request, 0, 64, 8)


def test_a_long_prompt_waits_until_all_of_it_fits():
    """Otherwise it is preempted and computed again and again beside a decode."""
    scheduler, executor = make(num_blocks=(16,), max_num_batched_tokens=8), FakeExecutor()
    scheduler.add(request(0, range(8), max_tokens=30))
    (long,) = scheduler.add(request(1, range(40), max_tokens=2))
    run(scheduler, executor)
    assert scheduler.num_preemptions == 0
    assert computed_tokens(executor) == 8 + 29 + 40 + 1
    assert long.output_token_ids == expected_output(long.request, 0, 64)


def test_hits_are_counted_once_and_as_they_were_used():
    scheduler, executor = make(max_num_seqs=1, num_blocks=(24,)), FakeExecutor()
    for number in range(4):
        scheduler.add(request(number, range(20), cache_key=b"k", max_tokens=4))
    run(scheduler, executor)
    stats = scheduler.prefix_cache.stats
    assert (stats.queried_tokens, stats.hit_tokens) == (80, 3 * 16)
