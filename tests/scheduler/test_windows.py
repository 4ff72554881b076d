"""Long prompts behind a window, in pools that hold one sequence: none waits for its own blocks."""

import random
from dataclasses import replace

import pytest
from tests.fakes import FakeExecutor
from tests.scheduler.test_scheduler import CONFIG, expected_output, make, request, run, run_ahead

from ridgeline.core.config import EngineConfig, blocks_per_sequence, resolve
from ridgeline.core.rounding import ceil_div
from ridgeline.core.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormKind,
    NormSpec,
)
from ridgeline.scheduler import Scheduler, SchedulerConfig, Speculation

NORM = NormSpec(kind=NormKind.RMS, eps=1e-6)


def _layer(window) -> LayerSpec:
    attention = AttentionSpec(
        num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0, rope=None, window=window
    )
    mlp = MLPSpec(width=8, activation=Activation.SILU)
    return LayerSpec(attention=attention, mlp=mlp, attention_norm=NORM, mlp_norm=NORM)


def smallest_pools(windows) -> tuple[int, ...]:
    """Blocks for one sequence of full length and no more."""
    return tuple(
        blocks_per_sequence(CONFIG["max_model_len"], window, block_tokens=CONFIG["block_tokens"])
        for window in windows
    )


def finish(scheduler, executor, drive=run_ahead, *, each_step=lambda: None, most=2000) -> None:
    """Run until nothing is left, and fail rather than go on for ever."""
    steps = 0

    def count():
        nonlocal steps
        steps += 1
        assert steps < most, "no end in sight"
        each_step()

    drive(scheduler, executor, each_step=count)
    assert not scheduler.has_work


@pytest.mark.parametrize("step_tokens", [3, 7, 16])
@pytest.mark.parametrize("windows", [(1,), (9,), (8,), (None, 5, 17)], ids=str)
@pytest.mark.parametrize("room", [1, 4])
def test_chunks_are_planned_ahead_without_a_preemption(windows, step_tokens, room):
    """They are whole where blocks are free, and shorter in a pool for one sequence."""
    scheduler = make(
        windows=windows,
        num_blocks=tuple(room * count for count in smallest_pools(windows)),
        max_num_batched_tokens=step_tokens,
    )
    executor = FakeExecutor(windows=windows)
    (sequence,) = scheduler.add(request(0, range(60), max_tokens=None))
    finish(scheduler, executor)
    window = 1000 if None in windows else max(windows)
    assert sequence.output_token_ids == expected_output(sequence.request, 0, 64, window)
    assert scheduler.num_preemptions == 0
    num_whole = ceil_div(60, step_tokens) + 3
    assert len(executor.plans) == num_whole if room > 1 else num_whole <= len(executor.plans) < 40


def test_a_prompt_of_ten_windows_holds_an_eighth_of_its_blocks_at_default_settings():
    """Counted after each step of the prompt and of decode."""
    spec = ModelSpec(
        model_type="fake",
        vocab_size=100,
        hidden_size=8,
        layers=tuple(_layer(window) for window in (None, 1024)),
        final_norm=NORM,
        max_position=10_240,
        tie_embeddings=True,
    )
    config = EngineConfig(  # as by default, but for the memory of this machine
        kv_cache_memory_bytes=640 + 73  # one sequence, at a byte a block
    )
    resolved = resolve(
        config, spec=spec, executor="fake", dtype="float32", block_bytes=(1, 1), free_bytes=0
    )
    assert resolved.max_model_len == 10_240
    assert resolved.num_blocks == (640, 73)
    only = replace(resolved, num_blocks=resolved.num_blocks[1:])
    scheduler = Scheduler(SchedulerConfig.of_engine(config, only, windows=(1024,)))
    executor = FakeExecutor(windows=(1024,), block_tokens=16)
    held = []
    (sequence,) = scheduler.add(request(0, [n % 97 for n in range(10_100)], max_tokens=None))
    finish(
        scheduler,
        executor,
        each_step=lambda: held.append(scheduler.kv_usage()[0].num_held),
    )
    assert sequence.num_output_tokens == 140
    assert scheduler.num_preemptions == 0
    assert 640 / max(held) > 8
    assert 640 / held[-2] > 9.5  # while it decodes


def test_a_long_prompt_leaves_its_neighbours_the_blocks_that_are_counted_for_them():
    """Two run, with blocks for both and few more: neither loses what it has computed."""
    windows, (each,) = (9,), smallest_pools((9,))
    scheduler = make(windows=windows, num_blocks=(2 * each + 2,), max_num_batched_tokens=64)
    executor = FakeExecutor(windows=windows)
    sequences = [
        *scheduler.add(request(0, range(3), max_tokens=None)),
        *scheduler.add(request(1, range(60), max_tokens=None)),
    ]
    finish(scheduler, executor)
    for sequence in sequences:
        assert sequence.output_token_ids == expected_output(sequence.request, 0, 64, 9)
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("windows", [(9,), (None, 5)], ids=str)
@pytest.mark.parametrize("cached", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("drive", [run, run_ahead])
def test_random_long_prompts_in_the_smallest_pool(seed, windows, cached, drive):
    rng = random.Random(seed)
    step_tokens = rng.choice([3, 7, 16])
    scheduler = make(
        windows=windows,
        num_blocks=smallest_pools(windows),
        max_num_batched_tokens=step_tokens,
    )
    executor = FakeExecutor(windows=windows)
    common = [rng.randrange(1000) for _ in range(40)]
    pending = [
        request(
            number,
            common[: rng.randint(0, 40)] + [rng.randrange(1000) for _ in range(rng.randint(1, 20))],
            cache_key=b"tenant" if cached else None,
            n=rng.choice([1, 1, 3]),
            max_tokens=rng.choice([1, 5, None]),
        )
        for number in range(6)
    ]
    sequences = []

    def arrive():
        if pending and rng.random() < 0.5:
            sequences.extend(scheduler.add(pending.pop(0)))

    while pending:
        arrive()
        finish(scheduler, executor, drive, each_step=arrive)
    window = 1000 if None in windows else max(windows)
    for sequence in sequences:
        expected = expected_output(sequence.request, sequence.sample_index, 64, window)
        assert sequence.output_token_ids == expected


class Masked(Speculation):
    """As if every request had a grammar, which allows everything."""

    def is_masked(self, sequence):
        return True


@pytest.mark.parametrize("num_prompt", range(16, 26))
@pytest.mark.parametrize("windows", [(None,), (9,)], ids=str)
def test_a_prompt_in_flight_that_nobody_gives_way_to_waits_for_its_result(windows, num_prompt):
    """Blocks run out while those that would have to go are in flight, with grammars."""
    settings = CONFIG | {
        "windows": windows,
        "num_blocks": smallest_pools(windows),
        "max_num_batched_tokens": 7,
    }
    scheduler = Scheduler(SchedulerConfig(**settings), Masked())
    executor = FakeExecutor(windows=windows)
    sequences = [
        *scheduler.add(request(0, range(num_prompt), max_tokens=None)),
        *scheduler.add(request(1, range(40), max_tokens=1)),
    ]
    finish(scheduler, executor)
    for sequence in sequences:
        window = windows[0] or 1000
        assert sequence.output_token_ids == expected_output(sequence.request, 0, 64, window)


@pytest.mark.skipif(not __debug__, reason="what is asserted is left out under -O")
@pytest.mark.parametrize("windows", [(None,), (9,)], ids=str)
def test_a_pool_holds_at_least_one_sequence(windows):
    (smallest,) = smallest_pools(windows)
    make(windows=windows, num_blocks=(smallest,))
    with pytest.raises(AssertionError, match="full length"):
        make(windows=windows, num_blocks=(smallest - 1,))
