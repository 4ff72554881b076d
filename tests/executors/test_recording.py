"""Recorded steps: every op once and in order, seconds that fit, and the same results."""

import time
from itertools import pairwise

import pytest
from tests.executors.host_cuda import host_executor
from tests.executors.test_contract import PROMPT
from tests.tiny import CONFIG, EXPERTS, LATENT, WINDOWED, Driver, tiny_executor, tiny_model

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.plan import ModelRole, Pass
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.kernels.cpu.library import native_kernels_run
from ridgeline.kernels.cpu.pool import Pool

needs_kernels = pytest.mark.skipif(not native_kernels_run(), reason="the kernels are not built")
KINDS = [
    pytest.param("reference", id="reference"),
    pytest.param("cuda", id="cuda"),
    pytest.param("cpu", id="cpu", marks=needs_kernels),
]


def make_driver(kind, config=CONFIG, **options):
    dtype = "float32" if kind == "cpu" else "float64"
    make = {"reference": None, "cuda": host_executor, "cpu": CPUExecutor}[kind]
    model = tiny_model(config, dtype=dtype, **options)
    executor = tiny_executor(model=model, make=make, block_tokens=16, num_blocks=64)
    return Driver(executor), model


def steps_of(driver, count):
    """A prompt and decode steps; the tokens, and what came of recording them all."""
    recorded = driver.executor.record(count)
    tokens = driver.decode(0, PROMPT, count)
    return tokens, recorded.result(timeout=60).steps()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "config", [CONFIG, WINDOWED, EXPERTS, LATENT], ids=["full", "windowed", "experts", "latent"]
)
def test_every_op_is_there_once_and_results_are_the_same(kind, config):
    plain, _ = make_driver(kind, config)
    wanted = plain.decode(0, PROMPT, 3)
    plain.executor.close()
    driver, model = make_driver(kind, config)
    begin_s = time.perf_counter()
    tokens, steps = steps_of(driver, 3)
    end_s = time.perf_counter()
    assert tokens == wanted
    assert [step.plan.num_tokens for step in steps] == [len(PROMPT), 1, 1]
    for step in steps:
        (a_pass,) = step.passes
        assert (a_pass.role, a_pass.pass_index, a_pass.step) == (ModelRole.TARGET, 0, 0)
        places = [place for span in a_pass.spans for place in span.ops]
        assert places == list(range(len(model.ops)))
        for span in a_pass.spans:
            if span.ops:
                assert span.name == "+".join(type(model.ops[p]).__name__ for p in span.ops)
            assert span.seconds == pytest.approx(span.work_s + span.wait_s + span.serial_s)
            assert min(span.seconds, span.work_s, span.serial_s) >= 0
            assert span.wait_s > -1e-6
        assert begin_s < step.begin_s < a_pass.spans[0].begin_s
        assert all(one.end_s <= other.begin_s + 1e-6 for one, other in pairwise(a_pass.spans))
        if kind != "cuda":  # a device has a clock of its own
            assert a_pass.spans[-1].end_s < step.end_s < end_s
    assert all(one.end_s < other.begin_s for one, other in pairwise(steps))
    driver.executor.close()


@needs_kernels
def test_a_replay_has_a_pass_for_each_step():
    driver, model = make_driver("cpu")
    driver.start(0, PROMPT)
    recorded = driver.executor.record(1)
    segment = driver.segment(0, len(PROMPT), [7])
    driver.run(passes=[Pass(segments=(segment,), num_steps=4)])
    (step,) = recorded.result(timeout=60).steps()
    assert [a_pass.step for a_pass in step.passes] == [0, 1, 2, 3]
    for a_pass in step.passes:
        assert [p for span in a_pass.spans for p in span.ops] == list(range(len(model.ops)))
        assert [span.name for span in a_pass.spans if not span.ops] == ["RopeTables", "Sample"]
    driver.executor.close()


@needs_kernels
def test_drafts_are_told_apart():
    draft = tiny_model(dtype="float32", seed=1)
    executor = tiny_executor(
        draft=draft, model=tiny_model(dtype="float32"), make=CPUExecutor, block_tokens=16
    )
    driver = Driver(executor)
    driver.start(0, PROMPT)
    recorded = executor.record(1)
    drafted = driver.segment(0, 0, PROMPT, fresh=True)
    verified = driver.segment(0, len(PROMPT), [7])
    driver.run(passes=[Pass(segments=(drafted,), role=ModelRole.DRAFT), Pass(segments=(verified,))])
    (step,) = recorded.result(timeout=60).steps()
    found = [(a_pass.role, a_pass.pass_index) for a_pass in step.passes]
    assert found == [(ModelRole.DRAFT, 0), (ModelRole.TARGET, 1)]
    executor.close()


@needs_kernels
def test_ops_of_the_reference_are_between_the_native_ones(monkeypatch):
    from ridgeline.core import ops
    from ridgeline.executors.cpu import native_ops

    kept = tuple(k for k in native_ops._NATIVE if k is not ops.MLP)
    monkeypatch.setattr(native_ops, "_NATIVE", kept)
    driver, model = make_driver("cpu")
    _, steps = steps_of(driver, 2)
    for step in steps:
        (a_pass,) = step.passes
        assert [p for span in a_pass.spans for p in span.ops] == list(range(len(model.ops)))
    driver.executor.close()


@needs_kernels
def test_what_is_not_recorded_asks_for_no_spans(monkeypatch):
    driver, _ = make_driver("cpu")
    tokens, _ = steps_of(driver, 2)

    def asked(_):
        raise AssertionError("spans are taken while nothing is recorded")

    monkeypatch.setattr(Pool, "take_spans", asked)
    assert driver.decode(1, PROMPT, 2) == tokens
    pool = driver.executor._pool
    assert pool.library.rl_num_spans(pool.handle) == 0
    driver.executor.close()


@needs_kernels
def test_two_executors_of_one_pool_record_each_its_own():
    (one, model), (other, _) = make_driver("cpu"), make_driver("cpu", WINDOWED)
    first, second = one.executor.record(2), other.executor.record(1)
    tokens = [*one.start(0, PROMPT).token_ids]
    other.start(0, PROMPT)  # ends its recording; the first one's goes on
    one.run(one.segment(0, len(PROMPT), tokens))
    for recorded, count in ((first, 2), (second, 1)):
        steps = recorded.result(timeout=60).steps()
        assert len(steps) == count
        for step in steps:
            (a_pass,) = step.passes
            assert [p for s in a_pass.spans for p in s.ops] == list(range(len(model.ops)))
    assert not one.executor._pool.is_recording
    for driver in (one, other):
        driver.executor.close()


@pytest.mark.parametrize("kind", KINDS)
def test_one_recording_at_a_time_and_it_may_end_early(kind):
    driver, _ = make_driver(kind)
    recorded = driver.executor.record(100)
    with pytest.raises(InvalidRequestError, match="already"):
        driver.executor.record(1)
    driver.start(0, PROMPT)
    driver.executor.stop_recording()
    assert len(recorded.result(timeout=60).steps()) == 1
    again = driver.executor.record(1)
    driver.run(driver.segment(0, len(PROMPT), [7]))
    assert len(again.result(timeout=60).steps()) == 1
    driver.executor.stop_recording()  # nothing is recorded any more
    driver.executor.close()
