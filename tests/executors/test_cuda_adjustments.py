"""Penalties, biases and barred tokens in deferrable steps: drawn as by the reference."""

import threading

import pytest
import torch
from tests.executors.host_cuda import host_executor
from tests.tiny import CONFIG, GREEDY, Driver, tiny_executor, tiny_model

from ridgeline.core.plan import Outputs, Pass, step_in_flight
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.executors.cuda import adjustments
from ridgeline.executors.cuda.host_device import HostDevice, HostGraph, NoWaits
from ridgeline.kernels.triton import IN_PROMPT

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33]
LOGITS = Outputs(sample=True, logits=True)
KINDS = {
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.9),
    "frequency": SamplingParams(temperature=0.3, frequency_penalty=2.0, presence_penalty=1.1),
    "bias": SamplingParams(temperature=0.9, top_p=0.9, logit_bias={11: -30.0, 55: 2.0, 17: 3.0}),
    "barred": SamplingParams(temperature=0.7, min_tokens=4, stop_token_ids=(5, 42)),
    "all": SamplingParams(
        temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4,
        logit_bias={5: 40.0, 9: -3.0}, min_tokens=5, stop_token_ids=(5, 30), top_k=40,
    ),
}  # fmt: skip
COUNT = 9


def driver_on(device=None, **settings):
    def make(models, block_tokens):
        return host_executor(models, block_tokens, device=device, num_slots=8, **settings)

    return Driver(tiny_executor(model=tiny_model(CONFIG), make=make, num_blocks=160))


@pytest.fixture(scope="module")
def expected():
    driver = Driver(tiny_executor(model=tiny_model(CONFIG), num_blocks=160))
    found = {}
    for name, params in KINDS.items():
        found[name] = driver.decode(0, PROMPT, COUNT, params, eos_token_ids=(11,))
        driver.run(passes=[], releases=(0,))
        same_draw = SamplingParams(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k
        )
        assert driver.decode(0, PROMPT, COUNT, same_draw) != found[name]
        driver.run(passes=[], releases=(0,))
    return found


@pytest.fixture
def device():
    return HostDevice()


@pytest.fixture
def driver(device):
    driver = driver_on(device)
    yield driver
    driver.executor.close()


def assert_counted(driver, slot, drawn):
    """The device's history of a sequence with penalties holds all but the last token drawn."""
    tables = driver.executor._opened.adjustments.tables
    known = drawn[:-1]
    if tables.counted[slot] < 0:
        return
    assert tables.counted[slot] == len(PROMPT) + len(known)
    expected = torch.bincount(torch.tensor(known, dtype=torch.int64), minlength=151)
    expected[PROMPT] += IN_PROMPT
    assert torch.equal(tables.history[slot].long(), expected)


@pytest.mark.parametrize("name", KINDS)
def test_single_steps_are_recorded_and_wait_for_nothing(driver, device, expected, name):
    device.scope = NoWaits
    for slot in (0, 1, 0):  # and again, where another sequence was before
        tokens = driver.decode(slot, PROMPT, COUNT, KINDS[name], eos_token_ids=(11,))
        assert tokens == expected[name]
        assert_counted(driver, slot, tokens)
        driver.run(passes=[], releases=(slot,))
    assert device.num_replays == 3 * (COUNT - 1)


@pytest.mark.parametrize("name", KINDS)
def test_replays_count_what_they_draw(driver, expected, name):
    first = driver.start(0, PROMPT, KINDS[name], eos_token_ids=(11,)).token_ids
    segment = driver.segment(0, len(PROMPT), first)
    handles = [driver.submit(passes=[Pass(segments=(segment,), num_steps=5)])]
    follow = driver.segment(0, len(PROMPT) + 5, [step_in_flight(4)])
    handles.append(driver.submit(passes=[Pass(segments=(follow,), num_steps=COUNT - 6)]))
    found = [handle.result().passes[0][0].token_ids for handle in handles]
    assert [*first, *found[0], *found[1]] == expected[name]
    assert_counted(driver, 0, expected[name])


@pytest.mark.parametrize("name", ["frequency", "all"])
def test_what_a_replay_was_stopped_before_is_not_counted(driver, monkeypatch, expected, name):
    """The step behind it, which refers to a token that was not drawn, is void."""
    first = driver.start(0, PROMPT, KINDS[name], eos_token_ids=(11,)).token_ids
    replay, handles = HostGraph.replay, []

    def stopped(graph):
        replay(graph)
        if len(handles) == 1:
            handles[0].abort()

    driver.run(driver.segment(0, len(PROMPT), first))  # recorded
    gate = threading.Event()
    driver.executor.thread.submit(gate.wait)
    monkeypatch.setattr(HostGraph, "replay", stopped)
    segment = driver.segment(0, len(PROMPT) + 1, expected[name][1:2])
    handles.append(driver.submit(passes=[Pass(segments=(segment,), num_steps=4)]))
    follow = driver.segment(0, len(PROMPT) + 5, [step_in_flight(3)])
    void = driver.submit(follow)
    gate.set()
    assert handles[0].result().passes[0][0].token_ids == tuple(expected[name][2:3])
    assert void.result().passes[0][0].token_ids == ()
    handles.append(void)
    tokens = expected[name][:3]
    while len(tokens) < COUNT:
        start = len(PROMPT) + len(tokens) - 1
        tokens += driver.run(driver.segment(0, start, tokens[-1:])).passes[0][0].token_ids
    assert tokens == expected[name]
    assert_counted(driver, 0, tokens)


@pytest.mark.parametrize("name", KINDS)
def test_steps_through_the_host_in_between_are_caught_up_with(driver, device, expected, name):
    """Every third step wants logits too; the history has to hold what those steps drew."""
    tokens = [*driver.start(0, PROMPT, KINDS[name], eos_token_ids=(11,)).token_ids]
    while len(tokens) < COUNT:
        outputs = LOGITS if len(tokens) % 3 else None
        start = len(PROMPT) + len(tokens) - 1
        result = driver.run(driver.segment(0, start, tokens[-1:], outputs=outputs))
        tokens += result.passes[0][0].token_ids
    assert tokens == expected[name]
    assert 0 < device.num_replays < COUNT - 1
    if (len(tokens) - 1) % 3 == 0:  # the last step was deferrable
        assert_counted(driver, 0, tokens)


def test_a_sequence_that_comes_back_has_its_output_counted(driver, expected):
    known = [*PROMPT, *expected["all"][:4]]
    fields = {"num_prompt_tokens": len(PROMPT), "eos_token_ids": (11,)}
    tokens = driver.decode(2, known, COUNT - 4, KINDS["all"], **fields)
    assert tokens == expected["all"][4:]
    assert_counted(driver, 2, expected["all"])


def test_one_batch_holds_all_kinds_and_plain_sequences(driver, device, expected):
    plain = driver.decode(0, PROMPT, COUNT, GREEDY)
    driver.run(passes=[], releases=(0,))
    kinds = {**KINDS, "plain": GREEDY}
    plain_slot = len(KINDS)
    driver.decode(plain_slot, PROMPT, 3, KINDS["all"], eos_token_ids=(11,))
    driver.run(passes=[], releases=(plain_slot,))
    tokens = {
        name: [*driver.start(slot, PROMPT, params, eos_token_ids=(11,)).token_ids]
        for slot, (name, params) in enumerate(kinds.items())
    }
    before = device.num_replays
    for step in range(COUNT - 1):
        segments = [
            driver.segment(slot, len(PROMPT) + step, tokens[name][-1:])
            for slot, name in enumerate(kinds)
        ]
        for name, result in zip(kinds, driver.run(*segments).passes[0], strict=True):
            tokens[name] += result.token_ids
    assert tokens == {**expected, "plain": plain}
    assert device.num_replays == before + COUNT - 1


def test_prompts_and_decode_steps_share_a_pass(driver, expected):
    first = driver.start(0, PROMPT, KINDS["all"], eos_token_ids=(11,)).token_ids
    admission = driver.admit(1, PROMPT, KINDS["frequency"], eos_token_ids=(11,))
    results = driver.run(
        driver.segment(1, 0, PROMPT, fresh=True),
        driver.segment(0, len(PROMPT), first),
        admissions=(admission,),
    ).passes[0]
    assert results[0].token_ids == tuple(expected["frequency"][:1])
    assert results[1].token_ids == tuple(expected["all"][1:2])


def test_more_edits_than_the_tables_have_room_for_go_through_the_host(monkeypatch, expected):
    monkeypatch.setattr(adjustments, "MOST_EDITS", 2)
    device = HostDevice()
    driver = driver_on(device)
    assert driver.decode(0, PROMPT, COUNT, KINDS["bias"], eos_token_ids=(11,)) == expected["bias"]
    assert device.num_replays == 0
    driver.run(passes=[], releases=(0,))
    tokens = driver.decode(0, PROMPT, COUNT, KINDS["repetition"], eos_token_ids=(11,))
    assert tokens == expected["repetition"]
    assert device.num_replays == COUNT - 1
    driver.executor.close()


def test_a_plain_batch_has_no_kernel_more(driver):
    """Sequences without adjustments run the steps that were recorded without them."""
    driver.decode(0, PROMPT, 3, GREEDY)
    driver.decode(1, PROMPT, 3, KINDS["all"])
    driver.run(passes=[], releases=(1,))
    recorded = driver.executor.num_recorded()
    driver.decode(1, PROMPT, 3, GREEDY)
    steps = driver.executor._models["target"].steps._steps
    assert driver.executor.num_recorded() == recorded == 2
    plain, adjusted = sorted(steps.items(), key=lambda item: item[0].adjusts)
    assert len(plain[1].graph._calls) < len(adjusted[1].graph._calls)
