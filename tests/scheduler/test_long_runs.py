"""Runs of minutes: a thousand workloads under preemption, and a million requests."""

import gc
import random
import resource
import time

import pytest
from tests.fakes import FakeExecutor
from tests.scheduler.simulation import NOTHING, TOKEN
from tests.scheduler.test_scheduler import expected_output, make, request, run, run_ahead
from tests.scheduler.test_tiers import make_with_tiers

from ridgeline.core.errors import OverloadedError
from ridgeline.core.request import FinishReason, Request
from ridgeline.core.result import StepResult
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.kvcache.tiers import RamTier
from ridgeline.scheduler import Scheduler, SchedulerConfig

POLICIES = ["fcfs", "priority", "edf", "fair"]


def workload(seed) -> int:
    """One random workload on a pool of little more than one sequence; returns the preemptions."""
    rng = random.Random(seed)
    windows = rng.choice([(None,), (9,), (None, 5, 17)])
    executor = FakeExecutor(windows=windows)
    settings = {
        "num_blocks": (rng.choice([18, 22]),) * len(windows),
        "max_num_batched_tokens": rng.choice([3, 7, 64]),
        "scheduling_policy": rng.choice(POLICIES),
        "batching": rng.choice(["continuous", "continuous", "static"]),
    }
    if rng.random() < 0.4:
        scheduler = make_with_tiers(executor, [RamTier(rng.choice([500, 10**6]))], **settings)
    else:
        scheduler = make(windows=windows, **settings)
    common = [rng.randrange(1000) for _ in range(40)]
    pending = [
        Request(
            request_id=number,
            prompt_token_ids=tuple(
                common[: rng.randint(0, 40)]
                + [rng.randrange(1000) for _ in range(rng.randint(1, 10))]
            ),
            params=SamplingParams(
                n=rng.choice([1, 1, 2, 4]), max_tokens=rng.choice([1, 5, 30, None])
            ),
            seed=number,
            cache_key=rng.choice([b"a" * 32, b"b" * 32, None]),
            tenant=rng.choice("xyz"),
            priority=rng.randint(0, 2),
            deadline_s=rng.choice([None, time.monotonic() + rng.random()]),
        )
        for number in range(6)
    ]
    sequences = []

    def between_steps():
        if pending and rng.random() < 0.6:
            sequences.extend(scheduler.add(pending.pop(0)))
        if sequences and rng.random() < 0.02:
            scheduler.finish(rng.choice(sequences), FinishReason.ABORT)

    drive = rng.choice([run, run_ahead])
    while pending or scheduler.has_work:
        between_steps()
        drive(scheduler, executor, each_step=between_steps)
    window = 1000 if None in windows else max(windows)
    for sequence in sequences:
        got = sequence.output_token_ids
        expected = expected_output(sequence.request, sequence.sample_index, 64, window)
        if sequence.finish_reason is FinishReason.ABORT:
            expected = expected[: len(got)]
        assert got == expected, seed
    if scheduler.transfers is not None:
        scheduler.transfers.poll()
    scheduler.check_integrity()
    return scheduler.num_preemptions


def test_forty_random_workloads_of_everything():
    assert sum(map(workload, range(40))) > 40


@pytest.mark.slow
def test_a_thousand_random_workloads_of_everything(counted):
    assert sum(map(workload, range(1000))) > 1000
    counted(1000)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_half_a_million_requests_twice(policy):
    """A million in all: memory stays flat, and nobody waits longer than the queue is, but for those
    whose place in it another tenant was owed."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=256, num_blocks=(1200,),
            windows=(None,), block_tokens=16, scheduling_policy=policy, max_num_waiting=1000,
        )
    )  # fmt: skip
    rng = random.Random(0)
    added = finished = step = longest_wait = num_shed = 0
    arrived: dict[int, int] = {}
    memory = []
    started_s = time.thread_time()
    while finished < 500_000:
        while added < 500_000:
            number = added
            try:
                scheduler.add(
                    Request(
                        request_id=number,
                        prompt_token_ids=tuple(
                            range(number % 50, number % 50 + rng.randint(1, 40))
                        ),
                        params=SamplingParams(max_tokens=rng.randint(1, 3)),
                        seed=0,
                        cache_key=bytes([number % 7]) * 32,
                        tenant=f"tenant {number % 1000 if number % 2 else number}",
                    )
                )
            except OverloadedError:
                break
            arrived[number] = step
            added += 1
        plan = scheduler.schedule()
        step += 1
        outcomes = tuple(TOKEN if s.outputs.sample else NOTHING for s in plan.passes[0].segments)
        result = StepResult(step_id=plan.step_id, passes=(outcomes,))
        for update in scheduler.update(plan, result):
            number = update.sequence.request.request_id
            if number in arrived and update.new_token_ids:
                longest_wait = max(longest_wait, step - arrived.pop(number))
            finished += update.sequence.is_finished
            if update.sequence.finish_reason is FinishReason.SHED:
                del arrived[number]
                num_shed += 1
        if step % 500 == 0:
            gc.collect()
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # KiB
    scheduler.check_integrity()
    assert not scheduler.has_work
    assert not arrived
    assert memory[-1] - memory[len(memory) // 4] < 10_000
    assert longest_wait < 200
    assert (num_shed > 0) == (policy == "fair")
    seconds = time.thread_time() - started_s
    print(f"{policy}: {seconds:.0f} s, {step} steps, wait {longest_wait}, {num_shed} shed")


def test_one_request_after_the_other_leaves_nothing_behind():
    scheduler, executor = make(), FakeExecutor()
    for number in range(300):
        scheduler.add(request(number, range(5), cache_key=b"k", max_tokens=2))
        run(scheduler, executor)
    waiting = scheduler._waiting
    for kept in (scheduler._lifecycle.running, scheduler._shed, scheduler._flights):
        assert not kept
    assert not waiting._holders
    assert not waiting._loading
    assert not waiting._forks
    assert not waiting._queue._entries
    assert not waiting._queue._lanes
