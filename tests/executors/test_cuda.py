"""The CUDA executor's own logic: graphs, buckets, steps ahead, transfers, what it refuses.

Its device is the CPU, as strict about graphs and waiting as a GPU.
"""

import gc
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.executors.host_cuda import DecidesOnDevice, host_executor
from tests.tiny import (
    CHUNKED,
    CONFIG,
    EXPERTS,
    GREEDY,
    GROWING,
    LATENT,
    NORMED_INSIDE,
    NORMED_LAST,
    STREAMS,
    WINDOWED,
    Driver,
    tiny_executor,
    tiny_model,
)

from ridgeline.core.errors import EngineError
from ridgeline.core.plan import BlockTableUpdate, ModelRole, Outputs, Pass, step_in_flight
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.executors.cuda.graphs import batch_bucket
from ridgeline.executors.cuda.host_device import HostDevice, HostEvent, HostWaitError, NoWaits
from ridgeline.executors.cuda.torch_kernels import TorchKernels

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95)
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.4, logit_bias={7: 3.0})
LONG = CONFIG | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}


class Pools(HostDevice):
    """A device that notes where the memory of graphs comes from."""

    def __init__(self):
        super().__init__()
        self.pools = []

    def capture(self, body, pool=None):
        self.pools.append(pool)
        return super().capture(body, pool)


def driver_on(device=None, *, config=CONFIG, num_slots=8, num_blocks=160, **settings):
    def make(models, block_tokens):
        return host_executor(models, block_tokens, device=device, num_slots=num_slots, **settings)

    return Driver(tiny_executor(model=tiny_model(config), make=make, num_blocks=num_blocks))


def test_a_graph_is_what_was_issued_and_nothing_that_python_decides():
    device = HostDevice()
    x, out, calls = torch.tensor([1.0, 2.0]), torch.zeros(2), []

    def body():
        calls.append(1)
        view = x.view(2, 1)[:, 0]
        out.copy_((view * 2 + 1).relu())

    graph = device.capture(body)
    x.copy_(torch.tensor([-5.0, 10.0]))
    graph.replay()
    assert out.tolist() == [0.0, 21.0]
    assert calls == [1]


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: x.repeat_interleave(torch.full((2,), 2)),
    ],
    ids=["item", "if", "mask", "nonzero", "new tensor", "repeats"],
)
def test_what_a_cuda_graph_cannot_do_the_hosts_cannot_either(body):
    x = torch.ones(2)
    with pytest.raises(HostWaitError):
        HostDevice().capture(lambda: body(x))


def test_buckets():
    assert [batch_bucket(n) for n in (1, 2, 3, 5, 9, 33, 65, 256, 257)] == [
        1, 2, 4, 8, 16, 48, 96, 256, 320,
    ]  # fmt: skip
    assert all(batch_bucket(n) >= n for n in range(1, 600))


def test_decode_steps_of_one_bucket_share_a_graph():
    device = HostDevice()
    driver = driver_on(device)
    for slot in range(4):
        driver.start(slot, PROMPT[slot:])
    recorded = []
    for slots in ([0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3], [2]):
        segments = [driver.segment(s, len(PROMPT) - s, [7]) for s in slots]
        driver.run(*segments)
        recorded.append(driver.executor.num_recorded())
    assert recorded == [1, 2, 3, 3, 3, 3]  # batches of 1, 2 and 4
    assert device.num_replays == 6
    driver.executor.close()


def test_prompts_are_not_recorded():
    device = HostDevice()
    driver = driver_on(device)
    driver.start(0, PROMPT)
    assert device.num_replays == 0
    driver.executor.close()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_replay_is_one_recorded_step_again_and_again(params):
    device = HostDevice()
    driver = driver_on(device)
    expected = [driver.decode(slot, PROMPT[slot:], 10, params) for slot in range(3)]
    before = device.num_replays
    tokens = [driver.start(3 + slot, PROMPT[slot:], params).token_ids for slot in range(3)]
    segments = [driver.segment(3 + slot, len(PROMPT) - slot, tokens[slot]) for slot in range(3)]
    result = driver.run(passes=[Pass(segments=tuple(segments), num_steps=9)])
    assert device.num_replays == before + 9
    for slot, segment in enumerate(result.passes[0]):
        assert [*tokens[slot], *segment.token_ids] == expected[slot]
    driver.executor.close()


class Gate(HostDevice):
    """A device that does what it is given while the gate is closed only once it is opened."""

    def __init__(self):
        super().__init__()
        self.open = threading.Event()
        self.open.set()

    def record(self, *, timed=False):
        event = HostEvent()
        if not self.open.is_set():
            event.wait = self.open.wait
        return event


def test_the_next_step_is_issued_while_one_runs():
    """Three steps of one sequence; each takes its token from the one before, on the device."""
    device = Gate()
    driver = driver_on(device)
    expected = driver.decode(0, PROMPT, 6)
    driver.start(1, PROMPT)
    driver.run(driver.segment(1, len(PROMPT), expected[:1]))
    device.open.clear()
    before = device.num_replays
    first = driver.submit(driver.segment(1, len(PROMPT) + 1, expected[1:2]))
    segments = (driver.segment(1, len(PROMPT) + 2, [step_in_flight(0)]),)
    second = driver.submit(passes=[Pass(segments=segments, num_steps=2)])
    driver.executor.in_turn(lambda: None)  # both have been issued
    assert device.num_replays == before + 3
    assert not first.done()
    assert not second.done()
    device.open.set()
    tokens = [*first.result().passes[0][0].token_ids, *second.result().passes[0][0].token_ids]
    assert tokens == expected[2:5]
    driver.executor.close()


def test_an_abort_leaves_out_replays_that_have_not_been_issued():
    device = Gate()
    driver = driver_on(device)
    token = driver.start(0, PROMPT).token_ids
    device.open.clear()
    before = device.num_replays
    segments = (driver.segment(0, len(PROMPT), token),)
    handle = driver.submit(passes=[Pass(segments=segments, num_steps=40)])
    while device.num_replays < before + 2:
        time.sleep(0.001)
    handle.abort()
    device.open.set()
    result = handle.result()
    assert result.aborted
    assert len(result.passes[0][0].token_ids) == device.num_replays - before == 2
    assert result.timings.prepare_s >= 0.0
    driver.executor.close()


def test_a_step_may_follow_a_replay_in_flight():
    driver = driver_on()
    expected = [driver.decode(slot, PROMPT[slot:], 9) for slot in range(2)]
    starts = [driver.start(2 + slot, PROMPT[slot:]).token_ids for slot in range(2)]
    segments = [driver.segment(2 + s, len(PROMPT) - s, starts[s]) for s in range(2)]
    handles = [driver.submit(passes=[Pass(segments=tuple(segments), num_steps=5)])]
    follow = [
        driver.segment(2 + s, len(PROMPT) - s + 5, [step_in_flight(5 * s + 4)]) for s in range(2)
    ]
    handles.append(driver.submit(passes=[Pass(segments=tuple(follow), num_steps=3)]))
    parts = [handle.result().passes[0] for handle in handles]
    for s in range(2):
        found = [*starts[s], *parts[0][s].token_ids, *parts[1][s].token_ids]
        assert found == expected[s]
    driver.executor.close()


def test_plain_steps_wait_for_nothing():
    """Prompts, decode steps and replays are issued without an op that would wait for a GPU."""
    device = HostDevice()
    driver = driver_on(device)
    expected = driver.decode(0, PROMPT, 6, SAMPLED)
    device.scope = NoWaits
    assert driver.decode(1, PROMPT, 3, SAMPLED) == expected[:3]
    segment = driver.segment(1, len(PROMPT) + 2, expected[2:3])
    result = driver.run(passes=[Pass(segments=(segment,), num_steps=3)])
    assert list(result.passes[0][0].token_ids) == expected[3:]
    driver.executor.close()


def test_a_step_that_waits_is_noticed(monkeypatch):
    device = HostDevice()
    driver = driver_on(device)
    driver.start(0, PROMPT)
    device.scope = NoWaits
    attend = TorchKernels.attend

    def waiting(self, *arguments):
        out = attend(self, *arguments)
        out.sum().item()
        return out

    monkeypatch.setattr(TorchKernels, "attend", waiting)
    with pytest.raises(Exception, match="HostWaitError"):
        driver.start(1, PROMPT)


def test_void_rows_write_nothing_and_draw_nothing():
    """A step that follows a token which could not be drawn leaves its sequence's KV alone."""
    driver = driver_on()
    expected = driver.decode(0, PROMPT, 3)
    for slot in (1, 2):
        driver.start(slot, PROMPT)
    weights = driver.executor._models["target"].weights.tensors["embed"]
    kept = weights[expected[0]].clone()
    with torch.inference_mode():  # as the weights were loaded
        weights[expected[0]] = float("nan")  # the next token of slot 1 is not a number's
    other = (expected[0] + 1) % 151
    first = driver.submit(
        driver.segment(1, len(PROMPT), expected[:1]), driver.segment(2, len(PROMPT), [other])
    )
    second = driver.submit(
        driver.segment(1, len(PROMPT) + 1, [step_in_flight(0)]),
        driver.segment(2, len(PROMPT) + 1, [step_in_flight(1)]),
    )
    void, live = first.result().passes[0]
    assert void.token_ids == ()
    assert len(live.token_ids) == 1
    with torch.inference_mode():
        weights[expected[0]] = kept
    void, live = second.result().passes[0]
    assert void.token_ids == ()
    assert len(live.token_ids) == 1
    again = driver.run(driver.segment(1, len(PROMPT), expected[:1])).passes[0][0]
    assert list(again.token_ids) == expected[1:2]
    driver.executor.close()


def test_a_mixed_step_orders_segments_by_length_and_results_by_plan():
    reference, ours = Driver(tiny_executor(num_blocks=160)), driver_on()
    long = [(7 * i) % 151 for i in range(40)]
    for driver in (reference, ours):
        driver.start(0, PROMPT)
    results = []
    for driver in (reference, ours):
        segments = [
            driver.segment(1, 0, long, fresh=True),
            driver.segment(0, len(PROMPT), [9]),
            driver.segment(2, 0, PROMPT[:3], fresh=True),
        ]
        admissions = (driver.admit(1, long), driver.admit(2, PROMPT[:3]))
        results.append(driver.run(*segments, admissions=admissions).passes[0])
    assert [r.token_ids for r in results[0]] == [r.token_ids for r in results[1]]
    ours.executor.close()


@pytest.mark.parametrize("execution", ["eager", "graphs"])
@pytest.mark.parametrize(
    "config",
    [CONFIG, WINDOWED, EXPERTS, LATENT, GROWING, NORMED_LAST, NORMED_INSIDE, STREAMS],
    ids=[
        "full",
        "windowed",
        "experts",
        "latent",
        "growing",
        "normed last",
        "normed inside",
        "streams",
    ],
)
def test_every_execution_draws_what_the_reference_draws(config, execution):
    reference = Driver(tiny_executor(model=tiny_model(config)))
    ours = driver_on(config=config, execution=execution)
    for params in (GREEDY, SamplingParams(temperature=1.1, top_k=20, min_p=0.02)):
        tokens = [
            driver.decode(0, PROMPT, 8, params, seed=2**63 + 5) for driver in (reference, ours)
        ]
        assert tokens[0] == tokens[1]
        for driver in (reference, ours):
            driver.run(passes=[], releases=(0,))
    ours.executor.close()


def test_attention_in_chunks_is_refused_by_name():
    with pytest.raises(EngineError, match="no kernel for attention in chunks"):
        driver_on(config=CHUNKED)


@pytest.mark.slow
def test_a_step_is_compiled_whole(monkeypatch):
    """PyTorch's compiler takes a decode step without a break; its back end is left out here."""
    compiled = partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiled)
    expected = driver_on().decode(0, PROMPT, 4, SAMPLED)

    class Replays(HostDevice):  # PyTorch does not compile what the host's graphs watch
        def capture(self, body, pool=None):
            body()
            return SimpleNamespace(replay=body)

    driver = driver_on(Replays(), execution="compile")
    assert driver.decode(0, PROMPT, 4, SAMPLED) == expected
    driver.executor.close()


def test_penalties_bias_and_minimum_length_are_the_references():
    params = SamplingParams(
        temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4,
        logit_bias={5: 4.0, 9: -3.0}, min_tokens=6, stop_token_ids=(5,), top_p=0.9,
    )  # fmt: skip
    tokens = []
    for driver in (Driver(tiny_executor()), driver_on()):
        tokens.append(driver.decode(0, PROMPT, 8, params, eos_token_ids=(11,)))
        driver.executor.close()
    assert tokens[0] == tokens[1]


def test_blocks_given_up_behind_a_window_are_not_read():
    """The scheduler's tables have −1 there, for the steps that bring whole tables again."""
    driver = driver_on(config=WINDOWED)  # 9 tokens
    expected = driver.decode(0, PROMPT, 8)
    first = driver.start(1, PROMPT).token_ids
    blocks = (-1, *range(driver.blocks_per_slot + 1, driver.blocks_per_slot + 8))
    segment = driver.segment(1, len(PROMPT), first)._replace(
        block_updates=(BlockTableUpdate(group=0, first=0, blocks=blocks),)
    )
    result = driver.run(passes=[Pass(segments=(segment,), num_steps=7)]).passes[0][0]
    assert [*first, *result.token_ids] == expected
    driver.executor.close()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_kv_is_close(kind):
    outputs = Outputs(sample=True, logits=True)
    exact, coarse = driver_on(), driver_on(kv_cache_dtype=kind)
    logits = [driver.start(0, PROMPT, outputs=outputs).logits for driver in (exact, coarse)]
    assert exact.executor.kv_layout().digest != coarse.executor.kv_layout().digest
    scale = np.abs(logits[0]).max()
    error = np.abs(logits[0] - logits[1]).max() / scale
    assert 0 < error < (0.02 if kind == "int8" else 0.08)
    for driver in (exact, coarse):
        driver.executor.close()


def test_more_sequences_than_a_bucket_and_tables_that_grow():
    driver = driver_on(num_slots=11, num_blocks=300)
    prompts = [PROMPT[slot % 5 :] for slot in range(11)]
    expected = [driver.decode(slot, prompt, 6) for slot, prompt in enumerate(prompts)]
    driver.run(passes=[], releases=tuple(range(11)))
    segments = [driver.segment(s, 0, p, fresh=True) for s, p in enumerate(prompts)]
    admissions = tuple(driver.admit(s, p) for s, p in enumerate(prompts))
    results = driver.run(*segments, admissions=admissions).passes[0]
    tokens = [[*result.token_ids] for result in results]
    for step in range(5):
        segments = [driver.segment(s, len(prompts[s]) + step, tokens[s][-1:]) for s in range(11)]
        for s, result in enumerate(driver.run(*segments).passes[0]):
            tokens[s] += result.token_ids
    assert tokens == expected
    driver.executor.close()


@pytest.mark.parametrize("config", [CONFIG, EXPERTS, LATENT], ids=["dense", "experts", "latents"])
def test_closing_frees_weights_and_graphs_without_the_collector(config):
    """A graph that is collected later may be destroyed while another one is captured."""
    driver = driver_on(config=config)
    driver.decode(0, PROMPT, 3)
    executor = driver.executor
    model = executor._models[ModelRole.TARGET]
    (step,) = model.steps._steps.values()
    parts = [model, model._program, model.steps, step.graph, step.inputs]
    parts += [*model.weights.tensors.values()]
    parts += [matrix.codes for matrix in model.weights.matrices.values()]
    left = [weakref.ref(part) for part in parts]
    gc.collect()
    gc.disable()
    try:
        executor.close()
        del model, step, parts
        assert [ref() for ref in left if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("config", [CONFIG, LATENT, LONG], ids=["dense", "latents", "long"])
def test_warming_up_records_every_batch_and_changes_nothing(config):
    device = HostDevice()
    driver = driver_on(device, config=config, warm_up=True)
    executor = driver.executor
    recorded = 0 if config is LONG else 16  # 1, 2, 4 and 8 rows; three draws, one with adjustments
    assert executor.num_recorded() == recorded
    assert device.num_replays == 0
    found = driver.decode(0, PROMPT, 8)
    assert executor.num_recorded() == recorded
    executor.close()
    reference = Driver(tiny_executor(model=tiny_model(config), num_blocks=160))
    assert found == reference.decode(0, PROMPT, 8)
    reference.executor.close()


def test_no_request_waits_for_a_step_to_be_recorded():
    """Of kernels that decide on the device: contexts of any length, draws of any kind."""
    config = CONFIG | {"max_position_embeddings": 1024}
    device = Pools()
    driver = driver_on(
        device, config=config, num_slots=2, num_blocks=400, warm_up=True, kernels=DecidesOnDevice()
    )
    reference = Driver(tiny_executor(model=tiny_model(config), num_blocks=400))
    driver.blocks_per_slot = reference.blocks_per_slot = 150
    recorded = len(device.pools)
    assert recorded == driver.executor.num_recorded() == 6  # 1 and 2 rows; truncated, adjusted
    for prompt in (PROMPT, PROMPT * 42):
        for params in (GREEDY, SamplingParams(temperature=0.9), SAMPLED, PENALISED):
            tokens = [each.decode(0, prompt, 3, params) for each in (driver, reference)]
            assert tokens[0] == tokens[1]
            for each in (driver, reference):
                each.run(passes=[], releases=(0,))
    assert len(device.pools) == recorded
    driver.executor.close()


def test_graphs_share_memory_that_the_largest_takes_and_that_goes_with_them():
    device = Pools()
    for _ in range(2):
        driver = driver_on(device, warm_up=True)
        steps = driver.executor._models[ModelRole.TARGET].steps._steps
        rows = [variant.rows for variant in steps]
        assert rows == sorted(rows, reverse=True)
        driver.executor.close()
    first, second = device.pools[: len(rows)], device.pools[len(rows) :]
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] is not second[0]


def test_tokens_are_drawn_from_logits_as_they_are_computed():
    """Half as many bytes as in float32; what is told of logits is computed in float32."""
    kinds = set()

    class Noting(TorchKernels):
        def sample(self, logits_NV, *arguments, **options):
            kinds.add(logits_NV.dtype)
            return super().sample(logits_NV, *arguments, **options)

    def make(models, block_tokens):
        return host_executor(models, block_tokens, kernels=Noting())

    model = tiny_model(dtype="bfloat16")
    driver = Driver(tiny_executor(model=model, make=make))
    driver.decode(0, PROMPT, 3)
    assert kinds == {torch.bfloat16}
    logits = driver.start(1, PROMPT, outputs=Outputs(sample=True, logits=True)).logits
    assert logits.dtype == np.float32
    driver.executor.close()
