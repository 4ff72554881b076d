"""Stages of a pipeline, together, give the bits of one process, and send what is priced."""

from itertools import pairwise

import pytest
from tests.executors.rank_threads import Together, on_executor
from tests.executors.test_ranks import (
    FOUR_HEADS,
    PROMPT,
    WIDE,
    _assert_same,
    _config,
    _model,
    _plain,
)
from tests.parity.every_case import CASES, quick
from tests.tiny import CONFIG, WINDOWED

from ridgeline.core.cache_groups import shares_kv
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import on_load_format
from ridgeline.core.plan import ModelRole, step_in_flight
from ridgeline.core.weight_uses import op_weights
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.executors.distributed.stages import layer_costs, layout_of
from ridgeline.executors.priced import priced_model
from ridgeline.executors.reference.executor import ReferenceExecutor
from ridgeline.executors.runner import StepRunner
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.op_cost import op_work
from ridgeline.roofline.work import total

ALL = [case for case in CASES if "vision" not in case.name]


def _layout(model, num_stages, tensor=1):
    config = EngineConfig(pipeline_parallel_size=num_stages, tensor_parallel_size=tensor)
    return layout_of(model, config, "cpu")


@pytest.mark.parametrize("case", quick(ALL), ids=lambda case: f"{case.family}-{case.name}")
def test_every_family_gives_the_same_bits(case):
    model = _model(_config(case))
    expected = on_executor(CPUExecutor({ModelRole.TARGET: model}, 16), _plain)
    stages = 2 if len(model.spec.layers) > 1 else 1
    if shares_kv(model.spec) or model.spec.layer_inputs is not None:
        with pytest.raises(SettingsError, match="pipeline_parallel_size"):
            Together(model, _layout(model, stages))
        return
    found = on_executor(Together(model, _layout(model, stages)), _plain)
    _assert_same(found, expected)


@pytest.mark.parametrize(("num_stages", "tensor"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("form", [None, "int8", "int4"])
def test_every_format_gives_the_same_bits(num_stages, tensor, form):
    config = WIDE | {"num_hidden_layers": 3, "tie_word_embeddings": True}
    model = _model(config, "bfloat16", quantization=on_load_format(form))
    expected = on_executor(CPUExecutor({ModelRole.TARGET: model}, 16), _plain)
    found = on_executor(Together(model, _layout(model, num_stages, tensor)), _plain)
    _assert_same(found, expected)


def test_the_reference_executor_runs_stages():
    model = _model(CONFIG, "float64")
    expected = on_executor(ReferenceExecutor({ModelRole.TARGET: model}, 4), _plain)
    together = Together(model, _layout(model, 2), 4, make=ReferenceExecutor)
    _assert_same(on_executor(together, _plain), expected)


def test_plans_of_other_sequences_are_not_waited_for(monkeypatch):
    """A reference to a plan whose outcome is still to come, and one to the plan before."""
    model = _model(CONFIG)

    def run(driver):
        driver.start(0, PROMPT)
        driver.start(1, PROMPT[:5])
        handles = [
            driver.submit(driver.segment(0, 13, [7])),
            driver.submit(driver.segment(1, 5, [9])),
        ]
        handles.append(driver.submit(driver.segment(0, 14, [step_in_flight(0, plans_back=2)])))
        tokens = [handle.result().passes[0][0].token_ids for handle in handles]
        handles = [driver.submit(driver.segment(0, 15, tokens[2]), driver.segment(1, 6, tokens[1]))]
        handles.append(driver.submit(driver.segment(1, 7, [step_in_flight(1)])))
        return tokens + [handle.result().passes[0][-1].token_ids for handle in handles]

    together = Together(model, _layout(model, 2))
    assert [executor.max_in_flight for executor in together.executors] == [3, 3]
    found = on_executor(together, run)
    monkeypatch.setattr(StepRunner, "max_in_flight", 3)
    assert found == on_executor(CPUExecutor({ModelRole.TARGET: model}, 16), run)


@pytest.mark.parametrize("tensor", [1, 2])
def test_what_stages_send_is_what_is_priced(tensor):
    model = _model(FOUR_HEADS)
    together = Together(model, _layout(model, 3, tensor))
    spans = [(0, 13), (13, 14)]

    def run(driver):
        driver.start(0, PROMPT)
        driver.run(driver.segment(0, 13, [7]))

    on_executor(together, run)
    for part, pipe, group in zip(together.parts, together.pipes, together.groups, strict=True):
        priced = priced_model(part, "cpu")
        work = total([op_work(op, make_batch([span]), priced) for span in spans for op in part.ops])
        sent_bytes, num_calls = group.counts() if tensor > 1 else (0, 0)
        assert num_calls + pipe.num_sent == work.link_messages
        if tensor == 1:
            assert sent_bytes + pipe.sent_bytes == work.link_bytes


def test_a_stage_has_its_weights_and_its_kv_alone():
    model = _model(WINDOWED | {"num_hidden_layers": 4, "tie_word_embeddings": True})
    layout = _layout(model, 2)
    together = Together(model, layout)
    whole = {use.name for op in model.ops for use in op_weights(op)}
    names = [{name for name, _ in part.weights.items()} for part in together.parts]
    assert names[0] | names[1] == whole
    assert names[0] & names[1] == {"embed"}  # which is the head, too
    sizes = [executor.weights_bytes() for executor in together.executors]
    one = CPUExecutor({ModelRole.TARGET: model}, 16)
    assert max(sizes) < 0.6 * one.weights_bytes()
    blocks = [executor.kv_layout().block_bytes for executor in together.executors]
    assert [sum(parts) for parts in zip(*blocks, strict=True)] == [*one.kv_layout().block_bytes]
    together.close()
    one.close()


def test_a_model_is_cut_by_the_price_of_its_layers():
    """The head is worth more than two layers, so that the last stage has fewer of them."""
    config = CONFIG | {"num_hidden_layers": 6, "vocab_size": 8000}
    model = _model(config)
    costs = layer_costs(priced_model(model, "cpu"))
    assert costs[-1] > 2 * costs[1]
    borders = _layout(model, 2).stage_borders
    assert borders == (0, 4, 6)
    stages = [sum(costs[first:last]) for first, last in pairwise(borders)]
    assert max(stages) < 1.25 * sum(stages) / 2
    with pytest.raises(SettingsError, match="has 6 layers, too few for 7 stages"):
        _layout(model, 7)
