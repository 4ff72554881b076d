"""Aborts at every state and errors at every place, in the engine's loop (RELIABILITY 22, 26)."""

import random
import sys

import pytest
from tests.fakes import FakeExecutor

from ridgeline import SamplingParams
from ridgeline.core.errors import EngineError
from ridgeline.core.request import FinishReason, Request
from ridgeline.engine import loop as loop_module
from ridgeline.engine import sample_output as sample_output_module
from ridgeline.engine.loop import EngineLoop
from ridgeline.scheduler import Scheduler, SchedulerConfig

NUM_BLOCKS = 24


def make_loop(tokenizer=None, **fields):
    config = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": 64,
        "num_blocks": (NUM_BLOCKS,),
        "windows": (None,),
        "block_tokens": 4,
    }
    scheduler = Scheduler(SchedulerConfig(**config | fields))
    return EngineLoop(FakeExecutor(), scheduler, tokenizer), scheduler


def make_request(number, rng, tokenizer=None):
    params = SamplingParams(
        max_tokens=rng.randint(1, 12),
        n=rng.choice([1, 1, 2, 3]),
        stop=("q",) if tokenizer else (),
        prompt_logprobs=None,
    )
    prompt = tuple(rng.randrange(3) for _ in range(rng.randint(1, 20)))
    return Request(
        request_id=number, prompt_token_ids=prompt, params=params, seed=number, cache_key=b"k"
    )


def outputs_of(requests, aborted, rng):
    """Run requests, aborting each of ``aborted`` at a random step; the tokens of the others."""
    loop, scheduler = make_loop()
    states = {}
    waiting = list(requests)
    abort_at = {number: rng.randint(0, 40) for number in aborted}
    for step in range(10_000):
        while waiting and rng.random() < 0.5:
            request = waiting.pop(0)
            states[request.request_id] = loop.add(request)
        for number, when in list(abort_at.items()):
            if when <= step and number in states:
                loop.abort(number)
                del abort_at[number]
        loop.check_integrity()
        loop.step()
        loop.check_integrity()
        if not waiting and not loop.has_work and not abort_at:
            break
    assert scheduler.prefix_cache.pools[0].num_free == NUM_BLOCKS
    assert scheduler.num_running == scheduler.num_waiting == 0
    return {
        number: [sample.token_ids for sample in state.output().outputs]
        for number, state in states.items()
        if number not in aborted
    }


@pytest.mark.parametrize("runs", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_aborts_at_any_step_leak_nothing_and_change_no_neighbour(runs, counted):
    num_aborts = 0
    for seed in range(runs):
        rng = random.Random(seed)
        requests = [make_request(number, rng) for number in range(12)]
        aborted = set(rng.sample(range(12), 5))
        num_aborts += len(aborted)
        expected = outputs_of(requests, set(), random.Random(seed))
        outputs = outputs_of(requests, aborted, random.Random(seed + 1))
        assert outputs == {number: expected[number] for number in outputs}
    assert num_aborts == 5 * runs
    counted(num_aborts)


def break_at(monkeypatch, owner, name, is_guilty):
    """Let calls of a method fail when ``is_guilty`` says so of its arguments."""
    original = getattr(owner, name)

    def broken(*args, **kwargs):
        if is_guilty(*args, **kwargs):
            raise RuntimeError("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


GUILTY, INNOCENT = 2, {0, 1, 3, 4}


def of_guilty_sample(sample, *_, **__):
    return sample.sequence.request.request_id == GUILTY


def of_guilty_state(state, *_, **__):
    return state.request.request_id == GUILTY


SAMPLE = sample_output_module.SampleOutput
STATE = loop_module.RequestState
GUARDED = [
    (STATE, "apply", of_guilty_state),
    (STATE, "_prompt_report", of_guilty_state),
    (SAMPLE, "push", of_guilty_sample),
    (SAMPLE, "_take", of_guilty_sample),
    (SAMPLE, "_flush", of_guilty_sample),
    (SAMPLE, "_detokenize", of_guilty_sample),
    (SAMPLE, "_hides_end", of_guilty_sample),
]


@pytest.mark.parametrize(
    ("owner", "name", "is_guilty"),
    GUARDED,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("after", [0, 3])
def test_an_error_about_one_request_ends_that_request_alone(
    monkeypatch, llm, owner, name, is_guilty, after
):
    def run():
        rng = random.Random(5)
        loop, scheduler = make_loop(llm.tokenizer)
        states = [loop.add(make_request(number, rng, llm.tokenizer)) for number in range(5)]
        ends = {}
        for _ in range(200):
            for chunk in loop.step():
                if chunk.finish_reason is not None:
                    ends.setdefault(chunk.request_id, set()).add(chunk.finish_reason)
            loop.check_integrity()
        assert not loop.has_work
        assert scheduler.prefix_cache.pools[0].num_free == NUM_BLOCKS
        return ends, states

    def texts(states):
        return [[sample.text for sample in state.output().outputs] for state in states]

    expected = texts(run()[1])
    calls = {"count": 0}

    def later(*args, **kwargs):
        calls["count"] += is_guilty(*args, **kwargs)
        return is_guilty(*args, **kwargs) and calls["count"] > after

    with monkeypatch.context() as patched:
        break_at(patched, owner, name, later)
        ends, states = run()
    if calls["count"] > after:
        assert FinishReason.ERROR in ends[GUILTY]
    assert not any(FinishReason.ERROR in ends[number] for number in INNOCENT)
    outputs = texts(states)
    assert all(outputs[number] == expected[number] for number in INNOCENT)


class BrokenHandle:
    def set_masks(self, masks): ...

    def result(self):
        raise RuntimeError("injected")


@pytest.mark.parametrize(
    ("part", "name", "broken"),
    [
        ("executor", "submit", lambda _: 1 / 0),
        ("executor", "submit", lambda _: BrokenHandle()),
        ("scheduler", "schedule", lambda: 1 / 0),
    ],
)
def test_an_error_of_a_whole_step_is_final_and_says_so(monkeypatch, part, name, broken):
    loop, _ = make_loop()
    loop.add(make_request(0, random.Random(0)))
    monkeypatch.setattr(getattr(loop, f"_{part}"), name, broken)
    with pytest.raises(EngineError, match=f"The {part} failed"):
        loop.step()
    with pytest.raises(EngineError, match=f"The {part} failed"):
        loop.step()
    with pytest.raises(EngineError):
        loop.add(make_request(1, random.Random(0)))


def count_instructions(num_requests):
    """Bytecode instructions of the loop's module in a step in which so many requests end."""
    loop, _ = make_loop(
        max_num_seqs=num_requests, max_num_batched_tokens=num_requests, num_blocks=(256,)
    )
    for number in range(num_requests):
        params = SamplingParams(max_tokens=1)
        loop.add(Request(request_id=number, prompt_token_ids=(1,), params=params, seed=0))
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename != loop_module.__file__:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        chunks = loop.step()
    finally:
        sys.settrace(before)
    assert sorted(chunk.request_id for chunk in chunks if chunk.timings) == [*range(num_requests)]
    return count


def test_many_requests_that_end_in_one_step_take_linear_time():
    assert count_instructions(128) < 16 * count_instructions(8)
