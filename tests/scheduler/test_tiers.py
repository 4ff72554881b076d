"""Blocks that leave the pool and come back: outputs are as without, and work is saved."""

import math
import random
import threading
import time

import pytest
from tests.fakes import FakeExecutor
from tests.scheduler.test_scheduler import CONFIG, expected_output, request, run, run_ahead

from ridgeline.core.errors import OverloadedError
from ridgeline.core.request import FinishReason
from ridgeline.kvcache import Match, prefix_cache
from ridgeline.kvcache.tiers import DiskTier, RamTier, Transfers, transfer_thread, transfers
from ridgeline.scheduler import Scheduler, SchedulerConfig


def make_with_tiers(executor, tiers, *, in_thread=False, **changes) -> Scheduler:
    settings = {**CONFIG, "windows": tuple(executor.windows), **changes}
    return Scheduler(
        SchedulerConfig(**settings),
        transfers=lambda cache: Transfers(cache, tiers, executor, in_thread=in_thread),
    )


def run_all(scheduler, executor) -> None:
    """Run, and wait for transfers where nothing else can be done."""
    while scheduler.has_work:
        run(scheduler, executor)
        time.sleep(scheduler.wait_s)


def computed(executor) -> int:
    return sum(plan.num_tokens for plan in executor.plans)


def evict_all(scheduler) -> None:
    for pool in scheduler.prefix_cache.pools:
        pool.release(pool.allocate(pool.num_free))


def ask(scheduler, executor, number, prompt, **settings) -> tuple[int, list[int]]:
    before = computed(executor)
    (sequence,) = scheduler.add(request(number, prompt, cache_key=b"k" * 32, **settings))
    run_all(scheduler, executor)
    return computed(executor) - before, sequence.output_token_ids


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("windows", [(None,), (6,), (None, 9)], ids=str)
def test_an_evicted_prefix_is_loaded(windows, in_thread):
    executor = FakeExecutor(windows=windows)
    scheduler = make_with_tiers(
        executor, [RamTier(10**6)], in_thread=in_thread, num_blocks=(64,) * len(windows)
    )
    _, output = ask(scheduler, executor, 0, range(41), max_tokens=1)
    run_saves(scheduler)
    evict_all(scheduler)
    tokens, again = ask(scheduler, executor, 0, range(41), max_tokens=1)
    assert (tokens, again) == (1, output)
    assert scheduler.num_loads == 1
    scheduler.close()


def run_saves(scheduler) -> None:
    deadline = time.monotonic() + 10
    while scheduler.transfers.is_busy and time.monotonic() < deadline:
        scheduler.transfers.poll()
        time.sleep(0.001)
    scheduler.check_integrity()


def test_hits_survive_a_restart_with_the_disk_tier(tmp_path):
    for restart in range(3):
        executor = FakeExecutor()  # with nothing in its blocks
        scheduler = make_with_tiers(executor, [RamTier(10**6), DiskTier(tmp_path, 10**6)])
        tokens, output = ask(scheduler, executor, 0, range(41), max_tokens=3)
        assert tokens == (41 + 2 if not restart else 1 + 2)
        assert output == expected_output(request(0, range(41), max_tokens=3), 0, 64)
        scheduler.close()


def test_what_is_not_saved_yet_is_at_the_end(tmp_path):
    executor = FakeExecutor()
    scheduler = make_with_tiers(executor, [DiskTier(tmp_path, 10**6)], max_num_batched_tokens=64)
    scheduler.add(request(0, range(41), cache_key=b"k" * 32, max_tokens=1))
    plan = scheduler.schedule()
    scheduler.update(plan, executor.submit(plan).result())
    assert scheduler.transfers.is_busy
    scheduler.close()
    assert DiskTier(tmp_path, 10**6).usage().num_entries == 10


def test_saves_hold_no_more_than_half_of_the_blocks():
    executor = FakeExecutor()
    settings = {"num_blocks": (18,), "max_num_batched_tokens": 64}
    scheduler = make_with_tiers(executor, [RamTier(10**6)], **settings)
    ask(scheduler, executor, 0, range(41), max_tokens=1)
    run_saves(scheduler)
    assert scheduler.transfers.stats.saved_blocks == 9
    assert scheduler.transfers.stats.skipped_blocks == 1


@pytest.mark.parametrize(("limit_s", "num_blocks"), [(math.inf, 10), (0.0, 4)])
def test_a_load_comes_in_parts_and_ends_with_the_one_that_takes_too_long(
    monkeypatch, limit_s, num_blocks
):
    monkeypatch.setattr(transfer_thread, "_BATCH", 4)
    executor = FakeExecutor()
    scheduler = make_with_tiers(executor, [RamTier(10**6)])
    ask(scheduler, executor, 0, range(41), max_tokens=1)
    run_saves(scheduler)
    evict_all(scheduler)
    transfers = scheduler.transfers
    load = transfers.load(b"k" * 32, Match([], [[]]), range(41), limit_s=limit_s)
    transfers.poll()
    assert load.is_done
    assert transfers.stats.loaded_blocks == num_blocks
    assert len(scheduler.prefix_cache.match(b"k" * 32, range(41)).nodes) == num_blocks


def test_a_hit_in_the_pool_is_a_use_in_every_tier():
    class Counted(RamTier):
        def __init__(self):
            super().__init__(10**6)
            self.touched = []

        def touch_all(self, keys):
            self.touched += keys
            return super().touch_all(keys)

    executor, tiers = FakeExecutor(), [Counted() for _ in range(3)]
    scheduler = make_with_tiers(executor, tiers)
    ask(scheduler, executor, 0, range(41), max_tokens=1)
    run_saves(scheduler)
    for tier in tiers:
        tier.touched.clear()
    ask(scheduler, executor, 0, range(41), max_tokens=1)
    scheduler.transfers.poll()
    keys = [node.key for node in scheduler.prefix_cache.match(b"k" * 32, range(41)).nodes]
    assert [tier.touched for tier in tiers] == [keys[::-1]] * 3  # children first: they go first


def test_a_prefix_that_was_computed_again_links_up_with_what_is_kept(tmp_path):
    """After a restart the first part is computed before the tiers are asked for the rest."""
    executor = FakeExecutor()
    scheduler = make_with_tiers(executor, [DiskTier(tmp_path, 10**6)])
    ask(scheduler, executor, 0, range(41), max_tokens=1)
    scheduler.close()
    executor = FakeExecutor()
    tier = DiskTier(tmp_path, 10**6)
    scheduler = make_with_tiers(executor, [tier])
    tier.may_have, may_have = (lambda _: False), tier.may_have
    ask(scheduler, executor, 0, range(21), max_tokens=1)
    run_saves(scheduler)
    tier.may_have = may_have
    tokens, _ = ask(scheduler, executor, 0, range(41), max_tokens=1)
    assert tokens == 1


def flood(scheduler, executor, first, count) -> None:
    """Prompts of ten blocks, each of its own."""
    for number in range(first, first + count):
        ask(scheduler, executor, number, [number] * 41, max_tokens=1)
        run_saves(scheduler)


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_prefix_that_is_hit_in_the_pool_stays_in_the_tiers(tmp_path, kind, in_thread):
    executor = FakeExecutor()
    tier = RamTier(6000) if kind == "ram" else DiskTier(tmp_path, 6000)
    scheduler = make_with_tiers(executor, [tier], num_blocks=(64,), in_thread=in_thread)
    for number in range(6):
        tokens, output = ask(scheduler, executor, 0, range(17), max_tokens=1)
        assert tokens == (1 if number else 17)
        flood(scheduler, executor, 100 + number, 1)
    assert tier.usage().num_evicted > 0
    evict_all(scheduler)
    assert ask(scheduler, executor, 0, range(17), max_tokens=1) == (1, output)
    scheduler.close()


@pytest.mark.parametrize("ram_bytes", [0, 10**6])
def test_a_kept_node_whose_entry_was_evicted_is_written_again_when_hit(tmp_path, ram_bytes):
    """Under the number by which its children on disk know it, so that a restart finds them."""
    executor, disk = FakeExecutor(), DiskTier(tmp_path, 6000)
    ram = [RamTier(ram_bytes)] if ram_bytes else []
    scheduler = make_with_tiers(executor, [*ram, disk], num_blocks=(200,))
    ask(scheduler, executor, 0, range(17), max_tokens=1)
    flood(scheduler, executor, 100, 5)
    nodes = scheduler.prefix_cache.match(b"k" * 32, range(17)).nodes
    uids = [node.uid for node in nodes]
    assert len(nodes) == 4
    assert not any(disk.may_have(node.key) for node in nodes)
    tokens, output = ask(scheduler, executor, 0, range(41), max_tokens=1)
    assert tokens == 41 - 16
    run_saves(scheduler)
    assert [disk.get(node.key).header.uid for node in nodes] == uids
    scheduler.close()
    executor = FakeExecutor()
    scheduler = make_with_tiers(executor, [DiskTier(tmp_path, 6000)])
    assert ask(scheduler, executor, 0, range(41), max_tokens=1) == (1, output)
    scheduler.close()


def test_a_prefix_of_a_deleted_tenant_is_not_written_again(tmp_path):
    executor, tier = FakeExecutor(), DiskTier(tmp_path, 10**6)
    scheduler = make_with_tiers(executor, [tier])
    ask(scheduler, executor, 0, range(41), max_tokens=1)
    run_saves(scheduler)
    scheduler.add(request(0, range(41), cache_key=b"k" * 32, max_tokens=1))
    plan = scheduler.schedule()
    scheduler.delete_tenant("")
    for _ in range(2):
        scheduler.transfers.poll()
    assert tier.usage().num_entries == 0
    scheduler.update(plan, executor.submit(plan).result())
    scheduler.close()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("windows", [(None,), (9,), (None, 5, 17)], ids=str)
@pytest.mark.parametrize("drive", [run, run_ahead])
def test_random_workloads_swap_instead_of_computing_again(seed, windows, drive):
    """A pool of little more than one sequence, tiers that hold everything, aborts at random."""
    rng = random.Random(seed)
    executor = FakeExecutor(windows=windows)
    scheduler = make_with_tiers(
        executor,
        [RamTier(rng.choice([300, 2000, 10**6]))],
        num_blocks=(rng.choice([18, 24]),) * len(windows),
        max_num_batched_tokens=rng.choice([3, 7, 64]),
    )
    common = [rng.randrange(1000) for _ in range(40)]
    pending = [
        request(
            number,
            common[: rng.randint(0, 40)] + [rng.randrange(1000) for _ in range(rng.randint(1, 10))],
            cache_key=rng.choice([b"a" * 32, b"b" * 32, None]),
            n=rng.choice([1, 1, 3]),
            max_tokens=rng.choice([1, 5, 30, None]),
        )
        for number in range(10)
    ]
    sequences, aborted = [], set()

    def between_steps():
        if pending and rng.random() < 0.5:
            sequences.extend(scheduler.add(pending.pop(0)))
        if sequences and rng.random() < 0.03:
            victim = rng.choice(sequences)
            aborted.add(victim)
            scheduler.finish(victim, FinishReason.ABORT)

    while pending or scheduler.has_work:
        between_steps()
        drive(scheduler, executor, each_step=between_steps)
    for sequence in sequences:
        window = 1000 if None in windows else max(windows)
        expected = expected_output(sequence.request, sequence.sample_index, 64, window)
        got = sequence.output_token_ids
        if sequence.finish_reason is FinishReason.ABORT:
            expected = expected[: len(got)]
        assert got == expected
    scheduler.transfers.poll()
    scheduler.check_integrity()
    assert not scheduler.transfers.stats.failures


def test_preempted_sequences_are_swapped_in(monkeypatch):
    monkeypatch.setattr(Transfers, "block_s", lambda *_: 0.0)  # whatever it takes here
    executor = FakeExecutor()
    scheduler = make_with_tiers(executor, [RamTier(10**6)], num_blocks=(20,))
    prompts = [range(n, n + 30) for n in (0, 100, 200)]
    for number, prompt in enumerate(prompts):
        scheduler.add(request(number, prompt, cache_key=b"k" * 32, max_tokens=30))
    run_all(scheduler, executor)
    assert scheduler.num_preemptions > 0
    assert scheduler.num_loads > 0
    total = sum(30 + 29 for _ in prompts)
    # Blocks of 4: what is not in a full block is computed again, and each time the last token.
    assert computed(executor) <= total + 5 * scheduler.num_preemptions


def test_saves_are_given_up_only_where_that_frees_a_block():
    executor = FakeExecutor()
    scheduler = make_with_tiers(executor, [RamTier(10**6)], max_num_batched_tokens=64)
    (sequence,) = scheduler.add(request(0, range(41), cache_key=b"k" * 32, max_tokens=9))
    plan = scheduler.schedule()
    scheduler.update(plan, executor.submit(plan).result())
    assert scheduler.transfers.is_busy
    assert not scheduler.transfers.cancel_saves()
    scheduler.finish(sequence, FinishReason.ABORT)
    num_free = scheduler.prefix_cache.pools[0].num_free
    assert scheduler.transfers.cancel_saves()
    assert scheduler.prefix_cache.pools[0].num_free == num_free + 4  # a few, the latest
    scheduler.check_integrity()
    assert scheduler.transfers.stats.skipped_blocks == 4
    nodes = scheduler.prefix_cache.match(b"k" * 32, range(41)).nodes
    assert [node.is_kept for node in nodes] == [True] * 6 + [False] * 4
    for node in nodes:
        scheduler.transfers.save(node)  # what was given up may be saved the next time
    run_saves(scheduler)
    assert scheduler.num_tier_blocks == (10, 0)


def test_entries_expire_where_transfers_are_made_without_a_thread():
    executor, now_s = FakeExecutor(), [0.0]
    tier = RamTier(10**6, ttl_s=10.0, clock=lambda: now_s[0])
    scheduler = make_with_tiers(executor, [tier])
    ask(scheduler, executor, 0, range(41), max_tokens=1)
    run_saves(scheduler)
    for now_s[0], num_entries in ((9.0, 10), (10.0, 0)):
        scheduler.idle()
        assert tier.usage().num_entries == num_entries


def test_what_a_victim_computed_is_saved_although_nothing_was_when_blocks_ran_out(monkeypatch):
    executor = FakeExecutor()
    scheduler = make_with_tiers(executor, [RamTier(10**6)], num_blocks=(20,))
    prompts = [range(100 * number, 100 * number + 30) for number in range(2)]
    for number, prompt in enumerate(prompts):
        scheduler.add(request(number, prompt, cache_key=b"k" * 32, max_tokens=30))
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.transfers._thread, "_work", lambda: None)  # a busy thread
        while not scheduler.num_preemptions:
            plan = scheduler.schedule()
            scheduler.update(plan, executor.submit(plan).result())
    scheduler.transfers.poll()
    kept = [scheduler.transfers.find(b"k" * 32, Match([], [[]]), prompt) for prompt in prompts]
    assert kept[0][0] == 7
    assert 0 < kept[1][0] < 7  # the latest made room
    run_all(scheduler, executor)
    scheduler.check_integrity()


@pytest.mark.parametrize("windows", [(None,), (5,)], ids=str)
def test_a_hash_collision_is_a_miss_in_the_tiers_too(monkeypatch, windows):
    monkeypatch.setattr(prefix_cache, "block_key", lambda *_: b"same" * 8)
    monkeypatch.setattr(transfers, "block_key", lambda *_: b"same" * 8)
    executor = FakeExecutor(windows=windows)
    scheduler = make_with_tiers(executor, [RamTier(10**6)])
    rng = random.Random(0)
    for number in range(60):
        prompt = [number % 3] * 4 + [number % 2] * 4 + [7] * 9
        a_request = request(number, prompt, cache_key=bytes([number % 2]) * 32, max_tokens=3)
        (sequence,) = scheduler.add(a_request)
        run_all(scheduler, executor)
        assert sequence.output_token_ids == expected_output(a_request, 0, 64, windows[0] or 1000)
        if rng.random() < 0.5:
            evict_all(scheduler)


def test_another_root_finds_nothing_on_the_same_disk(tmp_path):
    """The root key carries checkpoint, KV format, executor and salt."""
    for root in (b"checkpoint a", b"checkpoint b", b"int8"):
        executor = FakeExecutor()
        scheduler = make_with_tiers(executor, [DiskTier(tmp_path, 10**6)])
        (sequence,) = scheduler.add(request(0, range(41), cache_key=root, max_tokens=1))
        run_all(scheduler, executor)
        assert computed(executor) == 41
        assert scheduler.num_loads == 0
        assert sequence.num_cached_tokens == 0
        scheduler.close()


def test_a_deleted_tenant_is_not_found_again(tmp_path):
    executor = FakeExecutor()
    tiers = [RamTier(10**6), DiskTier(tmp_path, 10**6)]
    scheduler = make_with_tiers(executor, tiers)
    ask(scheduler, executor, 0, range(41), max_tokens=1)
    run_saves(scheduler)
    scheduler.delete_tenant("")
    tokens, _ = ask(scheduler, executor, 0, range(41), max_tokens=1)
    assert tokens == 41
    scheduler.close()


@pytest.mark.parametrize("num_cached", [0, 20])
@pytest.mark.parametrize("is_found", [True, False])
def test_a_load_in_flight_does_not_bring_a_deleted_tenant_back(monkeypatch, num_cached, is_found):
    monkeypatch.setattr(Transfers, "block_s", lambda *_: 0.0)  # whatever it takes here
    executor = FakeExecutor()
    tier = RamTier(10**6)
    scheduler = make_with_tiers(executor, [tier])
    _, output = ask(scheduler, executor, 0, range(41), max_tokens=1)
    run_saves(scheduler)
    evict_all(scheduler)
    if num_cached:
        ask(scheduler, executor, 1, range(num_cached + 1), max_tokens=1)
    before = computed(executor)
    (sequence,) = scheduler.add(request(0, range(41), cache_key=b"k" * 32, max_tokens=1))
    assert scheduler.schedule() is None
    assert scheduler.num_loads == 1 + bool(num_cached)
    if not is_found:
        tier.close()
    scheduler.delete_tenant("")
    run_all(scheduler, executor)
    scheduler.check_integrity()
    assert (computed(executor) - before, sequence.output_token_ids) == (41, output)
    scheduler.close()


def test_a_deletion_is_done_when_the_tiers_have_done_it():
    class Slow(RamTier):
        may_delete = threading.Event()

        def delete_tenant(self, tenant):
            assert self.may_delete.wait(10)
            return super().delete_tenant(tenant)

    tier, done = Slow(10**6), threading.Event()
    scheduler = make_with_tiers(FakeExecutor(), [tier], in_thread=True)
    scheduler.delete_tenant("a", done.set)
    assert not done.wait(0.05)
    tier.may_delete.set()
    assert done.wait(10)
    scheduler.close()


def test_nobody_waits_for_a_look_behind_what_a_slow_tier_is_given_for_others(monkeypatch):
    monkeypatch.setattr(transfer_thread, "_LOOK_S", 0.05)
    may_put, has_put = threading.Event(), threading.Event()

    class Slow(RamTier):
        def put_all(self, entries):
            may_put.wait(5)
            has_put.set()
            super().put_all(entries)

        def is_unsure(self, _key):
            return True

    executor = FakeExecutor()
    scheduler = make_with_tiers(executor, [Slow(10**6)], in_thread=True, num_blocks=(64,))
    ask(scheduler, executor, 0, range(41), max_tokens=1)  # which is being saved from now on
    tokens, output = ask(scheduler, executor, 1, range(7, 48), max_tokens=1)
    assert not has_put.is_set()
    assert tokens == 41
    assert output == expected_output(request(1, range(7, 48), max_tokens=1), 0, 64)
    may_put.set()
    run_saves(scheduler)
    scheduler.check_integrity()
    scheduler.close()


def test_a_tier_that_raises_ends_no_job_but_its_own():
    class Broken(RamTier):
        def is_unsure(self, _key):
            return True

        def look(self, *_):
            raise ValueError

        touch_all = delete_tenant = expire = look

    executor, done = FakeExecutor(), threading.Event()
    scheduler = make_with_tiers(executor, [Broken(10**6)], in_thread=True)
    plain = ask(scheduler, executor, 0, range(41), max_tokens=1)
    scheduler.delete_tenant("a", done.set)
    assert done.wait(10)
    run_saves(scheduler)
    evict_all(scheduler)
    assert ask(scheduler, executor, 0, range(41), max_tokens=1) == plain
    assert scheduler.transfers.stats.failures > 0
    scheduler.close()


def test_a_failing_executor_or_disk_only_costs_the_hit(tmp_path):
    class Failing(FakeExecutor):
        def import_blocks(self, *args):
            raise RuntimeError("lost")

    executor = Failing()
    scheduler = make_with_tiers(executor, [RamTier(10**6)])
    _, output = ask(scheduler, executor, 0, range(41), max_tokens=1)
    evict_all(scheduler)
    tokens, again = ask(scheduler, executor, 0, range(41), max_tokens=1)
    assert (tokens, again) == (41, output)
    assert scheduler.transfers.stats.failures == 1


def test_loads_are_made_only_where_they_beat_computing(monkeypatch):
    executor = FakeExecutor()
    scheduler = make_with_tiers(executor, [RamTier(10**6)])
    ask(scheduler, executor, 0, range(41), max_tokens=1)
    evict_all(scheduler)
    monkeypatch.setattr(Transfers, "block_s", lambda *_: 10.0)
    tokens, _ = ask(scheduler, executor, 0, range(41), max_tokens=1)
    assert tokens == 41
    monkeypatch.setattr(Transfers, "block_s", lambda *_: 1e-12)
    evict_all(scheduler)
    tokens, _ = ask(scheduler, executor, 0, range(41), max_tokens=1)
    assert tokens == 1


def test_a_queue_full_of_those_that_are_loaded_refuses_under_fair():
    executor = FakeExecutor()
    scheduler = make_with_tiers(
        executor, [RamTier(10**6)], scheduling_policy="fair", max_num_waiting=1
    )
    ask(scheduler, executor, 0, range(41), max_tokens=1)
    evict_all(scheduler)
    scheduler.add(request(1, range(41), cache_key=b"k" * 32, max_tokens=1))
    assert scheduler.schedule() is None
    assert scheduler.num_waiting == 1
    with pytest.raises(OverloadedError):
        scheduler.add(request(2, range(9), max_tokens=1))
    run_all(scheduler, executor)
    scheduler.check_integrity()
