"""The whole engine on the CUDA executor, on the CPU in float64: outputs are the reference's."""

from dataclasses import replace
from functools import partial

import pytest
from tests.executors.host_cuda import host_factory

from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import MachineError, OutOfMemoryError, SettingsError
from ridgeline.core.formats import on_load_format
from ridgeline.core.plan import ModelRole
from ridgeline.executors import create_executor, default_executor, registry
from ridgeline.executors.cuda.host_device import HostDevice
from ridgeline.executors.cuda.traits import TRAITS
from ridgeline.kernels.gpu import missing_for_gpu

PROMPTS = ["the cat sat on the mat the cat", "a", "mat on the"]
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=20),
    "penalties": SamplingParams(
        temperature=0.7, seed=1, repetition_penalty=1.3, min_tokens=8, max_tokens=20
    ),
    "logprobs": SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, max_tokens=6),
    "several": SamplingParams(temperature=1.0, n=3, seed=9, max_tokens=12),
    "grammar": SamplingParams(
        temperature=0.0, structured_outputs={"regex": "[a-z ]{8,20}"}, max_tokens=20
    ),
}
SETTINGS = {"dtype": "float64", "block_tokens": 4, "max_num_seqs": 8}


@pytest.fixture
def on_host(monkeypatch):
    """``executor="cuda"`` is the CUDA executor on a `HostDevice` of so many bytes."""

    def install(total=1 << 34):
        device = HostDevice(total=total)
        traits = replace(TRAITS, create=partial(host_factory, device=device))
        monkeypatch.setitem(registry._TRAITS, "cuda", traits)
        return device

    return install


@pytest.fixture(scope="module")
def expected(model_folder):
    with LLM(str(model_folder), executor="reference", **SETTINGS) as llm:
        return {name: texts(llm, params) for name, params in PARAMS.items()}


def texts(llm, params):
    return [
        [(sample.token_ids, sample.finish_reason, told(sample)) for sample in output.outputs]
        for output in llm.generate(PROMPTS, params)
    ]


def told(sample):
    return [
        (entry.token_id, round(entry.logprob, 6), entry.rank) for entry in sample.logprobs or ()
    ]


@pytest.mark.parametrize("name", PARAMS)
def test_outputs_are_the_references(on_host, model_folder, expected, name):
    device = on_host()
    with LLM(str(model_folder), executor="cuda", **SETTINGS) as llm:
        for _ in range(2):  # the second time prefixes are cached
            assert texts(llm, PARAMS[name]) == expected[name]
        llm._loop.check_integrity()
    assert device.num_replays > 0 or name in ("logprobs", "grammar")


def test_speculation_changes_nothing(on_host, model_folder, expected):
    on_host()
    with LLM(str(model_folder), executor="cuda", speculation="ngram", **SETTINGS) as llm:
        for name in ("greedy", "sampled", "penalties"):
            assert texts(llm, PARAMS[name]) == expected[name]


def test_preempted_and_chunked_outputs_are_the_same(on_host, model_folder, expected):
    on_host()
    settings = SETTINGS | {"max_num_batched_tokens": 16, "max_model_len": 64}
    with LLM(str(model_folder), executor="cuda", **settings) as llm:
        block_bytes = llm.config.kv_cache_bytes // llm.config.num_blocks[0]
    settings["kv_cache_memory_bytes"] = 18 * block_bytes
    with LLM(str(model_folder), executor="cuda", **settings) as llm:
        assert texts(llm, PARAMS["several"]) == expected["several"]


def test_the_pool_is_what_the_device_has_beside_weights_and_steps(on_host, model_folder):
    total = 256 << 20
    device = on_host(total)
    settings = SETTINGS | {"max_num_seqs": 4096, "max_model_len": 256}
    pools = []
    for share in (0.9, 0.6):
        with LLM(
            str(model_folder), executor="cuda", gpu_memory_utilization=share, **settings
        ) as llm:
            pools.append(llm.config.kv_cache_bytes)
            budget = llm._engine.executor.kv_budget_bytes(llm.config.max_num_batched_tokens)
            assert 0.9 * budget < llm.config.kv_cache_bytes <= budget
    assert pools[0] - pools[1] == pytest.approx(0.3 * total, rel=0.05)
    device.used = int(0.2 * total)  # by others
    with LLM(str(model_folder), executor="cuda", **settings) as llm:
        assert pools[0] - llm.config.kv_cache_bytes == pytest.approx(0.2 * total, rel=0.05)


def test_weights_that_do_not_fit_are_refused_with_numbers_and_flags(on_host, model_folder):
    on_host(total=700_000)
    with pytest.raises(OutOfMemoryError) as caught:
        LLM(str(model_folder), executor="cuda", **SETTINGS)
    for text in ("GB in float64", "host has", "gpu_memory_utilization 0.9", "--quantization int4"):
        assert text in str(caught.value)


def test_kv_that_does_not_fit_is_refused_with_the_flag(on_host, model_folder):
    on_host(total=16 << 20)
    with pytest.raises(OutOfMemoryError, match="gpu_memory_utilization"):
        LLM(str(model_folder), executor="cuda", max_model_len=256, gpu_memory_utilization=0.15,
            **SETTINGS)  # fmt: skip


@pytest.mark.skipif(missing_for_gpu() is None, reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_in_a_sentence_and_auto_goes_on(model_folder):
    with pytest.raises(
        MachineError, match=r"The cuda executor cannot run here: .*(CUDA|NVIDIA driver)"
    ):
        LLM(str(model_folder), executor="cuda")
    assert default_executor() in ("cpu", "reference")


def test_auto_takes_a_gpu_where_there_is_one(monkeypatch):

    monkeypatch.setattr("ridgeline.executors.cuda.traits.missing_for_gpu", lambda: None)
    assert default_executor() == "cuda"
    assert default_executor(dtype="float64") == "reference"


def test_fp8_is_refused_where_there_is_none():
    from tests.tiny import tiny_model

    form = on_load_format("fp8")
    for role in ModelRole:
        models = {each: tiny_model() for each in ModelRole}
        models[role] = replace(models[role], quantization=form)
        with pytest.raises(SettingsError, match="fp8"):
            create_executor(models, EngineConfig(executor="cpu", block_tokens=16))


def test_the_reference_executor_quantizes_no_model():
    from tests.tiny import tiny_model

    for role in ModelRole:
        models = {each: tiny_model() for each in ModelRole}
        models[role] = replace(models[role], quantization=on_load_format("int8"))
        with pytest.raises(SettingsError, match="does not quantize"):
            create_executor(models, EngineConfig(executor="reference", block_tokens=4))


def test_utilization_is_a_share(model_folder):
    for share in (0, 1.5, "all"):
        with pytest.raises(SettingsError, match="gpu_memory_utilization"):
            LLM(str(model_folder), gpu_memory_utilization=share)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["greedy", "sampled", "penalties", "several", "grammar"])
def test_a_gpu_gives_the_references_outputs(model_folder, name):
    """In float32, where another order of sums moves logits by less than tokens of this model lie
    apart; cached, chunked and verified runs included."""
    settings = {"dtype": "float32", "block_tokens": 16, "max_num_seqs": 8}
    with LLM(str(model_folder), executor="reference", **settings) as llm:
        expected = ids(llm, PARAMS[name])
    for more in ({}, {"max_num_batched_tokens": 16}, {"speculation": "ngram"}):
        with LLM(str(model_folder), executor="cuda", **settings, **more) as llm:
            for _ in range(2):
                assert ids(llm, PARAMS[name]) == expected


def ids(llm, params):
    return [[s.token_ids for s in output.outputs] for output in llm.generate(PROMPTS, params)]
