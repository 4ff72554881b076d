"""Drafts of the target's own first layers: one set of weights, one KV, and who cannot have them."""

import pytest
from tests.equivalence.test_speculation import PROMPTS, essence, params

from ridgeline import LLM
from ridgeline.core.errors import SettingsError
from ridgeline.core.ops import Attend, Head
from ridgeline.core.plan import ModelRole
from ridgeline.kernels.cpu.library import native_kernels_run
from ridgeline.roofline.memory import weights_bytes

NATIVE = pytest.mark.skipif(not native_kernels_run(), reason="the native kernels are not built")


@NATIVE
def test_an_exit_takes_no_weights_and_no_kv_of_its_own():
    with LLM(executor="cpu", max_model_len=64, speculation="exit", draft_layers=2) as llm:
        executor = llm._engine.executor
        assert executor.pools[ModelRole.DRAFT] is executor.pools[ModelRole.TARGET]
        models = executor._models
        assert models[ModelRole.DRAFT].weights is models[ModelRole.TARGET].weights
        assert llm._engine.info.config.num_draft_blocks == ()


@NATIVE
def test_a_draft_pass_is_priced_as_the_layers_before_the_exit_and_the_head():
    with LLM(executor="cpu", max_model_len=64, speculation="exit", draft_layers=2) as llm:
        priced = llm._engine.observer.models
        draft, target = priced[ModelRole.DRAFT], priced[ModelRole.TARGET]
        assert sum(isinstance(op, Attend) for op in draft.ops) == 2
        assert isinstance(draft.ops[-1], Head)
        layer_bytes = (weights_bytes(target) - weights_bytes(draft)) / (len(target.spec.layers) - 2)
        assert weights_bytes(draft) > 2 * layer_bytes > 0


def test_an_exit_before_the_last_layer_agrees_with_the_model_most_of_the_time():
    outputs = {}
    for layers in (1, 4):
        with LLM(
            executor="cpu" if native_kernels_run() else "reference",
            max_model_len=64,
            speculation="exit",
            draft_layers=layers,
        ) as llm:
            outputs[layers] = essence(llm.generate(PROMPTS, params("greedy")))
            figures = llm.speculation()
            outputs[layers, "rate"] = figures.num_accepted / figures.num_drafted
    assert outputs[1] == outputs[4]
    assert outputs[4, "rate"] > outputs[1, "rate"]


@pytest.mark.parametrize("speculation", ["combined", "adaptive"])
def test_others_that_use_a_draft_model_take_an_exit_in_its_place(pairs, speculation):
    settings = {"executor": "reference", "dtype": "float64", "block_tokens": 4}
    outputs = []
    for drafting in ({}, {"speculation": speculation, "draft_layers": 1}):
        with LLM(str(pairs / "full"), **settings, **drafting) as llm:
            outputs.append([essence(llm.generate(PROMPTS, params("sampled"))) for _ in range(2)])
            if drafting:
                assert llm.speculation().num_drafted > 0
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft_layers": 99}, "leaves nothing to skip"),
        ({"draft_layers": 1, "draft_model": "other"}, "draft_model has no effect"),
        ({"speculation": "combined", "draft_layers": 1, "draft_model": "x"}, "leave out draft_mod"),
        ({"speculation": "draft", "draft_layers": 1}, "draft_layers has no effect without"),
        ({"executor": "cpu", "tensor_parallel_size": 2}, "tensor_parallel_size does not draft"),
        ({"executor": "cpu", "pipeline_parallel_size": 2}, "pipeline_parallel_size does not draft"),
        ({"executor": "cuda"}, "the cuda executor does not draft"),
    ],
    ids=str,
)
def test_what_an_exit_cannot_do_is_refused_in_one_sentence(pairs, settings, words):
    with pytest.raises(SettingsError, match=words):
        LLM(str(pairs / "full"), **({"speculation": "exit", "executor": "reference"} | settings))
