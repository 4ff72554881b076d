"""Attention by FlashAttention: how its arguments are mapped, who is chosen, what is refused.

The package is a stand-in with its published functions (`flash_standin`).
"""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.executors.flash_standin import Package
from tests.executors.host_cuda import host_executor
from tests.tiny import (
    CONFIG,
    GREEDY,
    LATENT,
    SINKS,
    SOFTCAPPED,
    WINDOWED,
    Driver,
    tiny_executor,
    tiny_model,
)

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import MachineError, SettingsError
from ridgeline.core.plan import ModelRole, Outputs, Pass
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.executors import create_executor
from ridgeline.executors.cuda.attention import AttentionBackends, ModelAttention
from ridgeline.executors.cuda.attention_trial import Trial, TrialShape, _fitting
from ridgeline.executors.cuda.host_device import HostDevice
from ridgeline.executors.cuda.kernels import AttendSpec
from ridgeline.executors.cuda.kv_cache import DeviceKVCache
from ridgeline.executors.cuda.timing import seconds_on
from ridgeline.executors.cuda.torch_kernels import TorchKernels

LOGITS = Outputs(sample=True, logits=True)
PROMPTS = [[(7 * i + 3 * s) % 151 for i in range(length)] for s, length in enumerate((40, 23, 5))]


class FakeTimer:
    """Seconds by phase; ours takes 1."""

    def __init__(self, decode, prefill):
        self.theirs = {True: decode, False: prefill}
        self.calls = []

    def __call__(self, device, call, *, recorded):
        call()
        self.calls.append(recorded)
        return 1.0 if len(self.calls) % 2 else self.theirs[recorded]


@pytest.fixture(autouse=True)
def timed_by_one_call(monkeypatch):
    """On load, so that no model waits for windows of the clock; the package is the faster."""
    monkeypatch.setattr("ridgeline.executors.cuda.model.seconds_on", FakeTimer(0.5, 0.5))


class Apart(Driver):
    """Each KV group has blocks of its own."""

    def segment(self, *arguments, **fields):
        segment = super().segment(*arguments, **fields)
        updates = tuple(
            replace(each, blocks=tuple(block + 80 * each.group for block in each.blocks))
            for each in segment.block_updates
        )
        return segment._replace(block_updates=updates)


def driver_of(package=None, *, config=CONFIG, wanted="flash-attn", **settings):
    """With attention by the package, or by PyTorch's ops alone."""
    backends = None if package is None else AttentionBackends(wanted=wanted, package=package)

    def make(models, block_tokens):
        return host_executor(models, block_tokens, attention=backends, **settings)

    return Apart(tiny_executor(model=tiny_model(config), make=make, num_blocks=160))


def everything(driver):
    """Logits and tokens of prompts, of a step with all kinds of rows, and of recorded steps."""
    found = []
    segments = [driver.segment(s, 0, p, fresh=True, outputs=LOGITS) for s, p in enumerate(PROMPTS)]
    admissions = tuple(driver.admit(s, p) for s, p in enumerate(PROMPTS))
    found += driver.run(*segments, admissions=admissions).passes[0]
    mixed = [
        driver.segment(0, 40, [9], outputs=LOGITS),
        driver.segment(3, 0, PROMPTS[0][:30], fresh=True, outputs=LOGITS),
        driver.segment(1, 23, [11], outputs=LOGITS),
        driver.segment(4, 0, PROMPTS[1][:19], fresh=True, outputs=LOGITS),
    ]
    admissions = (driver.admit(3, PROMPTS[0][:30]), driver.admit(4, PROMPTS[1][:19]))
    found += driver.run(*mixed, admissions=admissions).passes[0]
    chunks = [
        driver.segment(3, 30, [5] * 20, outputs=LOGITS),
        driver.segment(2, 5, [1, 2, 3], outputs=LOGITS),  # a few tokens
        driver.segment(0, 41, [4], outputs=LOGITS),
    ]
    found += driver.run(*chunks).passes[0]
    steps = tuple(driver.segment(s, at, [8]) for s, at in ((0, 42), (1, 24), (2, 8)))
    found += driver.run(passes=[Pass(segments=steps, num_steps=6)]).passes[0]
    driver.executor.close()
    return found


@pytest.mark.parametrize("major", [2, 3])
@pytest.mark.parametrize(
    "config", [CONFIG, WINDOWED, SOFTCAPPED], ids=["full", "windowed", "softcapped"]
)
def test_the_package_is_given_what_the_kernels_are(config, major):
    package = Package(major)
    expected = everything(driver_of(config=config))
    device = HostDevice()
    driver = driver_of(package.functions(), config=config, device=device)
    before = device.num_replays
    for calls in package.calls.values():
        calls.clear()
    found = everything(driver)
    for ours, theirs in zip(expected, found, strict=True):
        assert ours.token_ids == theirs.token_ids
        if ours.logits is not None:
            np.testing.assert_allclose(theirs.logits, ours.logits, atol=1e-9)
    assert device.num_replays == before + 6
    layers = 3
    recorded = [shape for shape in package.calls["with_kvcache"] if shape[0] == 4]
    assert len(recorded) >= layers, "recorded steps of 3, padded to 4"
    ragged = [shape[0] for shape, _ in package.calls["varlen"]]
    assert {63, 49, 20} <= set(ragged), "of prompts, of a mixed step, and of a chunk"


@pytest.mark.slow  # interpreted, over a minute
def test_a_block_of_256_tokens_is_what_version_2_reads():
    package = Package(2, page_multiple=256)
    backends = AttentionBackends(wanted="flash-attn", package=package.functions())

    def driver(backends):
        def make(models, block_tokens):
            return host_executor(models, block_tokens, attention=backends)

        config = CONFIG | {"max_position_embeddings": 600}
        executor = tiny_executor(
            model=tiny_model(config), make=make, num_blocks=12, block_tokens=256
        )
        return Driver(executor, blocks_per_slot=2)

    prompt = [(5 * i) % 151 for i in range(270)]
    expected, found = (driver(each).decode(1, prompt, 4) for each in (None, backends))
    assert found == expected
    assert package.calls["with_kvcache"]
    assert package.calls["varlen"]


def test_q_takes_the_type_of_the_kv():
    """And the output has the model's, as the kernels' has."""
    package = Package(3).functions(dtypes=(torch.float32,))
    driver = driver_of(package, kv_cache_dtype="float32")
    expected = driver_of(kv_cache_dtype="float32")
    outputs = [each.start(0, PROMPTS[0], outputs=LOGITS).logits for each in (driver, expected)]
    np.testing.assert_allclose(*outputs, atol=1e-3)


def test_trees_of_drafts_are_the_kernels():
    package = Package(3)
    results = []
    for driver in (driver_of(), driver_of(package.functions())):
        driver.start(0, PROMPTS[0])
        tree = driver.segment(
            0, 40, [9, 1, 2, 3], num_drafts=3, parents=(-1, -1, 0), outputs=LOGITS
        )
        calls = len(package.calls["with_kvcache"])
        results.append(driver.run(tree).passes[0][0])
        assert len(package.calls["with_kvcache"]) == calls
    assert results[0].token_ids == results[1].token_ids
    np.testing.assert_allclose(results[0].logits, results[1].logits, atol=1e-9)


def decided(package, timer, *, wanted="auto", dtype=torch.float64, op=None, **spec):
    """An `ModelAttention` of one op that has been decided, and what it was decided over."""
    device = HostDevice()
    model = tiny_model(CONFIG)
    op = op or next(each for each in model.ops if hasattr(each, "softcap"))
    op = replace(op, **spec)
    cache = DeviceKVCache(device, model.spec, dtype, 4)
    cache.allocate([40] * len(cache.groups))
    attention = ModelAttention(TorchKernels(), AttentionBackends(wanted=wanted, package=package))
    attended = attention.op(op, AttendSpec(group=op.group, scale=op.scale, window=op.window))
    attention.decide(device, cache, num_slots=8, longest=64, trial=Trial(timer=timer))
    return attention, attended, cache


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ((0.5, 2.0), "FlashAttention 3 stand-in for decode"),
        ((2.0, 0.5), "FlashAttention 3 stand-in for prefill"),
        ((0.5, 0.5), "FlashAttention 3 stand-in for decode and prefill"),
        ((2.0, 2.0), ""),
        ((0.98, 1.0), ""),  # hardly faster
    ],
)
def test_the_faster_is_taken_for_decode_and_for_prompts(caplog, seconds, taken):
    caplog.set_level(logging.INFO)
    timer = FakeTimer(*seconds)
    attention, _, cache = decided(Package(3).functions(), timer)
    assert attention.taken == taken
    assert set(timer.calls) == {True, False}
    (said,) = [record.message for record in caplog.records]
    for phase in ("decode", "prefill"):
        name = "FlashAttention 3 stand-in" if phase in taken else "the torch kernels"
        assert f"{phase} by {name}" in said
    assert all(tensor.abs().max() == 0 for tensor in (cache.layer(0).k, cache.layer(0).v))


def test_what_was_decided_is_what_runs():
    package = Package(3)
    for seconds, function in (((0.5, 2.0), "with_kvcache"), ((2.0, 0.5), "varlen")):
        backends = AttentionBackends(package=package.functions())
        made = []

        def make(models, block_tokens, backends=backends, made=made):
            made.append(host_executor(models, block_tokens, attention=backends))
            return made[0]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ridgeline.executors.cuda.model.seconds_on", FakeTimer(*seconds))
            driver = Driver(tiny_executor(make=make, num_blocks=160))
        for calls in package.calls.values():
            calls.clear()
        driver.decode(0, PROMPTS[0], 3)
        ran = {name for name, calls in package.calls.items() if calls}
        assert ran == {function}
        assert "attention by FlashAttention 3 stand-in" in made[0].kernels
        driver.executor.close()


def test_a_mismatch_is_said_and_the_kernels_run(caplog):
    attention, *_ = decided(Package(3, wrong=0.01).functions(), FakeTimer(0.1, 0.1))
    assert attention.taken == ""
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "outputs differ by 1.0e-02" in caplog.text
    with pytest.raises(MachineError, match=r"attention_backend flash-attn: .*outputs differ"):
        decided(Package(3, wrong=0.01).functions(), FakeTimer(0.1, 0.1), wanted="flash-attn")


def test_an_error_of_the_package_is_said_and_the_kernels_run(caplog):
    def broken(*_, **__):
        raise RuntimeError("no kernel image is available")

    package = replace(Package(3).functions(), with_kvcache=broken)
    attention, *_ = decided(package, FakeTimer(0.1, 0.1))
    assert attention.taken == ""
    assert "failed in decode (no kernel image is available)" in caplog.text
    assert "the torch kernels run it" in caplog.text


def test_a_package_that_would_wait_is_not_recorded(caplog):
    package = Package(3)
    honest = package.with_kvcache_3

    def waits(*arguments, **named):
        int(named["cache_seqlens"].max().item())
        return honest(*arguments, **named)

    functions = replace(package.functions(), with_kvcache=waits)
    attention, *_ = decided(functions, seconds_on)
    assert "decode" not in attention.taken
    assert "waits for the device" in caplog.text


@pytest.mark.parametrize(
    ("limits", "settings", "reason"),
    [
        ({}, {"dtype": torch.float32}, "reads float64 KV, and this is float32"),
        ({"page_multiple": 256}, {}, "blocks of multiples of 256 tokens, and block_tokens is 4"),
        ({"most_width": 4}, {}, "has heads of up to 4 elements, multiples of 8, and these have 8"),
        ({}, {"head_dim": 12}, "and these have 12"),
        ({}, {"sinks": object()}, "has no sinks"),
    ],
    ids=["dtype", "page", "wide", "odd", "sinks"],
)
def test_what_it_cannot_do_is_the_kernels_and_said_once(caplog, limits, settings, reason):
    caplog.set_level(logging.INFO)
    attention, *_ = decided(Package(3).functions(**limits), FakeTimer(0.1, 0.1), **settings)
    assert attention.taken == ""
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("Attention is that of the torch kernels: FlashAttention 3 stand-in ")
    assert reason in said


def test_triton_alone_is_not_timed(caplog):
    caplog.set_level(logging.INFO)
    timer = FakeTimer(0.1, 0.1)
    attention, *_ = decided(Package(3).functions(), timer, wanted="triton")
    assert attention.taken == ""
    assert timer.calls == []
    assert caplog.records == []


def test_a_package_that_is_not_installed_is_told(caplog):
    caplog.set_level(logging.INFO)
    decided("FlashAttention is not installed (flash-attn).", FakeTimer(0.1, 0.1))
    assert "Attention is that of the torch kernels: FlashAttention is not inst" in caplog.text


def test_flash_attn_is_refused_where_it_is_not_installed():
    missing = "FlashAttention is not installed (flash-attn)."
    with pytest.raises(MachineError, match=r"flash-attn cannot be used: .* not installed"):
        driver_of(missing)


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        (LATENT, {}, "is not used for latents"),
        (SINKS, {}, "has no sinks"),
        (CONFIG, {"kv_cache_dtype": "int8"}, "reads float64 KV, and this is int8"),
        (CONFIG, {"kv_cache_dtype": "fp8"}, "and this is float8_e4m3fn"),
    ],
    ids=["latents", "sinks", "int8", "fp8"],
)
def test_flash_attn_is_refused_where_it_does_not_fit(config, settings, reason):
    with pytest.raises(SettingsError, match=f"flash-attn does not fit: .*{reason}"):
        driver_of(Package(3).functions(), config=config, **settings)
    driver = driver_of(Package(3).functions(), config=config, wanted="auto", **settings)
    assert driver.executor._models[ModelRole.TARGET].attention.taken == ""
    assert driver.decode(0, PROMPTS[0], 3, GREEDY)
    driver.executor.close()


def test_layers_of_several_kinds_are_decided_apart(caplog):
    caplog.set_level(logging.INFO)
    driver = driver_of(Package(3).functions(), config=SOFTCAPPED, wanted="auto")
    said = [r.message for r in caplog.records if r.message.startswith("Attention")]
    assert len(said) == 2
    assert sum("with a window of 9" in message for message in said) == 1
    driver.executor.close()


def test_points_are_no_larger_than_the_pool():
    points = (TrialShape(1, 1, 8192), TrialShape(64, 1, 1024), TrialShape(8, 1, 64))
    found = _fitting(points, num_blocks=40, block_tokens=4, table_blocks=64, num_slots=8)
    assert found == (TrialShape(1, 1, 160), TrialShape(8, 1, 20))
    assert _fitting(points, num_blocks=0, block_tokens=4, table_blocks=64, num_slots=8) == ()


def test_other_executors_refuse_the_setting():
    models = {ModelRole.TARGET: tiny_model()}
    for name in ("reference", "cpu"):
        for setting in ({"attention_backend": "triton"}, {"gpu_memory_utilization": 0.9}):
            (key,) = setting
            with pytest.raises(SettingsError, match=f"{key} is of .* is {name}"):
                create_executor(models, EngineConfig(executor=name, block_tokens=16, **setting))
    with pytest.raises(SettingsError, match="attention_backend must be one of auto, triton"):
        EngineConfig(attention_backend="flashinfer")


def test_sampled_steps_are_the_same():
    params = SamplingParams(temperature=0.9, top_p=0.9)
    tokens = [
        driver.decode(0, PROMPTS[0], 8, params)
        for driver in (driver_of(), driver_of(Package(2).functions()))
    ]
    assert tokens[0] == tokens[1]
