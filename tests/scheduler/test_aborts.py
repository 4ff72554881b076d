"""A request ends at any state and any step; the others do not notice, and no block is lost."""

from dataclasses import replace

import pytest
from tests.fakes import FakeExecutor
from tests.scheduler.test_scheduler import expected_output, make, request, run, run_ahead
from tests.scheduler.test_tiers import make_with_tiers

from ridgeline.core.request import FinishReason
from ridgeline.engine.loop import EngineLoop
from ridgeline.kvcache.tiers import RamTier


def requests():
    common = list(range(500, 520))
    return [
        request(0, [*common, 1, 2], cache_key=b"k" * 32, max_tokens=12),
        request(1, [*common, 3], cache_key=b"k" * 32, n=3, max_tokens=9),
        request(2, range(30), cache_key=b"k" * 32, max_tokens=12),
        request(3, [*common, 1, 2, 7], cache_key=None, max_tokens=12),
    ]


def scheduler_and_executor(kind):
    windows = (None, 9) if kind == "windows" else (None,)
    executor = FakeExecutor(windows=windows)
    # With 24 blocks the four do not fit together: some are preempted.
    settings = {"num_blocks": (24,) * len(windows), "max_num_batched_tokens": 9}
    if kind == "tiers":
        return make_with_tiers(executor, [RamTier(10**6)], **settings), executor
    return make(windows=windows, **settings), executor


@pytest.mark.parametrize("kind", ["plain", "windows", "tiers"])
@pytest.mark.parametrize("drive", [run, run_ahead])
@pytest.mark.parametrize("victim", range(4))
def test_abort_after_every_step(kind, drive, victim):
    """Once for each step of the run; the last time nothing is left to abort."""
    at_step, states, aborted_any = 0, set(), True
    while aborted_any:
        scheduler, executor = scheduler_and_executor(kind)
        groups = [scheduler.add(each) for each in requests()]
        steps, aborted_any = 0, False

        def abort(groups=groups, scheduler=scheduler, at_step=at_step):
            nonlocal steps, aborted_any
            if steps == at_step:
                for sequence in groups[victim]:
                    if not sequence.is_finished:
                        aborted_any = True
                        states.add(
                            (sequence.status, sequence.kv.holds_blocks, sequence.num_in_flight)
                        )
                        scheduler.finish(sequence, FinishReason.ABORT)
                    scheduler.check_integrity()
            steps += 1

        abort()
        while scheduler.has_work:
            drive(scheduler, executor, each_step=abort)
        for number, sequences in enumerate(groups):
            for sequence in sequences:
                expected = expected_output(sequence.request, sequence.sample_index, 64)
                if number == victim:
                    expected = expected[: sequence.num_output_tokens]
                assert sequence.output_token_ids == expected
        if scheduler.transfers is not None:
            scheduler.transfers.poll()
        scheduler.check_integrity()
        held = [pool.num_blocks - pool.num_free for pool in scheduler.prefix_cache.pools]
        assert held == [0] * len(held)
        at_step += 1
    assert at_step > 10
    assert len(states) >= 2


@pytest.mark.parametrize("kind", ["plain", "windows", "tiers"])
def test_abort_while_the_step_runs(kind):
    for at_step in range(25):
        scheduler, executor = scheduler_and_executor(kind)
        groups = [scheduler.add(each) for each in requests()]
        step = 0
        while scheduler.has_work:
            plan = scheduler.schedule()
            if plan is None:
                continue
            result = executor.submit(plan).result()
            if step == at_step:
                for sequence in groups[at_step % 4]:
                    scheduler.finish(sequence, FinishReason.ABORT)
            scheduler.update(plan, result)
            scheduler.check_integrity()
            step += 1
        for number, sequences in enumerate(groups):
            if number != at_step % 4:
                for sequence in sequences:
                    expected = expected_output(sequence.request, sequence.sample_index, 64)
                    assert sequence.output_token_ids == expected


def test_abort_while_blocks_are_loaded():
    executor = FakeExecutor()
    scheduler = make_with_tiers(executor, [RamTier(10**6)])
    first = request(0, range(41), cache_key=b"k" * 32, max_tokens=1)
    scheduler.add(first)
    run(scheduler, executor)
    scheduler.transfers.poll()
    for pool in scheduler.prefix_cache.pools:
        pool.release(pool.allocate(pool.num_free))
    (sequence,) = scheduler.add(first)
    assert scheduler.schedule() is None
    assert scheduler.wait_s > 0
    assert scheduler.num_waiting == 1
    scheduler.finish(sequence, FinishReason.ABORT)
    scheduler.check_integrity()
    assert not scheduler.has_work
    assert scheduler.schedule() is None
    scheduler.check_integrity()


def test_who_was_shed_hears_of_it_though_the_one_who_took_its_place_is_gone():
    """Nothing is left to compute then."""
    scheduler = make(scheduling_policy="priority", max_num_waiting=1)
    loop = EngineLoop(FakeExecutor(), scheduler, None)
    loop.add(replace(request(0, range(5)), priority=2))
    loop.add(replace(request(1, range(5)), priority=1))
    loop.abort(1)
    assert loop.has_work
    (chunk,) = loop.step()
    assert (chunk.request_id, chunk.finish_reason) == (0, FinishReason.SHED)
    assert chunk.timings is not None
    assert not loop.has_work
    assert loop.step() == []
