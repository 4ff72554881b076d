"""Ranks that share a model's experts give the bits of one process, and exchange what is priced."""

import numpy as np
import pytest
from tests.executors.rank_threads import RankThreads, Together, on_executor
from tests.executors.test_ranks import (
    DENSE,
    PROMPT,
    _assert_same,
    _config,
    _counts,
    _model,
    _plain,
    _priced,
)
from tests.parity.every_case import CASES, quick
from tests.tiny import CONFIG, EXPERTS, LATENT

from ridgeline.core import ops
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import on_load_format
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole
from ridgeline.core.sharding import num_parts
from ridgeline.core.weight_uses import op_weights, weight_uses
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.executors.distributed.stages import layout_of
from ridgeline.executors.priced import priced_model
from ridgeline.executors.reference.executor import ReferenceExecutor
from ridgeline.models import describe, lower, shard
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.op_cost import op_work
from ridgeline.roofline.work import total


def _has_experts(case):
    ops_of = lower(describe(_config(case)).spec)
    return any(isinstance(op, ops.MoE) for op in ops_of)


MIXTURES = [case for case in CASES if "vision" not in case.name and _has_experts(case)]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    ranks = RankThreads(request.param, layout=ParallelLayout(expert=request.param))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("case", quick(MIXTURES), ids=lambda case: f"{case.family}-{case.name}")
def test_every_family_with_experts_gives_the_same_bits(ranks, case):
    model = _model(_config(case))
    expected = on_executor(CPUExecutor({ModelRole.TARGET: model}, 16), _plain)
    for found in ranks.on_parts(model, _plain):
        _assert_same(found, expected)


@pytest.mark.parametrize("form", [None, "int8", "int4"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_every_format_gives_the_same_bits_within_stages_too(num_stages, form):
    wide = {"hidden_size": 320, "intermediate_size": 416, "num_attention_heads": 4}
    config = EXPERTS | wide | {"num_key_value_heads": 2, "num_hidden_layers": 2}
    model = _model(config, "bfloat16", quantization=on_load_format(form))
    layout = layout_of(
        model, EngineConfig(pipeline_parallel_size=num_stages, expert_parallel_size=2), "cpu"
    )
    expected = on_executor(CPUExecutor({ModelRole.TARGET: model}, 16), _plain)
    _assert_same(_of_last(model, layout), expected)


BOTH = ParallelLayout(tensor=2, expert=4)
SPLIT = [case for case in MIXTURES if case in DENSE]


@pytest.mark.parametrize("config", [EXPERTS, LATENT], ids=["experts", "latent"])
@pytest.mark.parametrize("form", [None, "int8"])
def test_experts_over_more_ranks_than_the_matrices_give_the_same_bits(config, form):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4 if config is LATENT else 2}
    model = _model(config | heads, "bfloat16", quantization=on_load_format(form))
    expected = on_executor(CPUExecutor({ModelRole.TARGET: model}, 16), _plain)
    together = Together(model, BOTH)
    _assert_same(on_executor(together, _plain), expected)
    priced = [priced_model(part, "cpu") for part in together.parts]
    spans = [make_batch([span]) for span in ((0, 13), (13, 14))]
    together = Together(model, BOTH)
    on_executor(together, _prompt_and_token)
    work = [
        total([op_work(op, span, each) for span in spans for op in each.ops]) for each in priced
    ]
    counted = [group.counts() for group in together.groups]
    assert [calls for _, calls in counted] == [each.link_messages for each in work]
    sent = sum(num_bytes for num_bytes, _ in counted)
    assert sent == pytest.approx(sum(each.link_bytes for each in work), rel=1e-9)


def _prompt_and_token(driver):
    driver.start(0, PROMPT)
    driver.run(driver.segment(0, 13, [7]))


@pytest.mark.parametrize("case", quick(SPLIT), ids=lambda case: f"{case.family}-{case.name}")
def test_every_family_that_is_split_gives_the_same_bits_so(case):
    model = _model(_config(case))
    layout = ParallelLayout(tensor=2, expert=4)
    if min(op.up.shape[0] for op in model.ops if isinstance(op, ops.MoE)) < 4:
        with pytest.raises(SettingsError, match="less than 4 ranks"):
            shard(model.spec, layout, 0)
        return
    expected = on_executor(CPUExecutor({ModelRole.TARGET: model}, 16), _plain)
    _assert_same(on_executor(Together(model, layout), _plain), expected)


def test_a_rank_has_its_part_of_the_matrices_and_fewer_experts():
    spec = describe(EXPERTS | {"num_attention_heads": 4, "num_key_value_heads": 2}).spec
    parts = [shard(spec, BOTH, rank).ops for rank in range(4)]
    for use in (use for op in lower(spec) for use in weight_uses(op)):
        rows = [
            {w.name: w for op in part for w in op_weights(op)}[use.weight.name].shape[0]
            for part in parts
        ]
        assert all(abs(own - use.weight.shape[0] / num_parts(use, BOTH)) < 1 for own in rows)


def test_experts_on_fewer_ranks_than_the_matrices_are_refused():
    config = EngineConfig(tensor_parallel_size=4, expert_parallel_size=2)
    with pytest.raises(SettingsError, match=r"expert_parallel_size \(2\) must be a multiple"):
        layout_of(_model(EXPERTS), config, "cpu")
    config = EngineConfig(tensor_parallel_size=2, expert_parallel_size=4)
    with pytest.raises(SettingsError, match="no experts; lower expert_parallel_size"):
        layout_of(_model(CONFIG), config, "cpu")


def _of_last(model, layout):
    if layout.pipeline > 1:
        return on_executor(Together(model, layout), _plain)
    ranks = RankThreads(layout.expert, layout=layout)
    try:
        return ranks.on_parts(model, _plain)[-1]
    finally:
        ranks.close()


def test_the_reference_executor_shares_experts(ranks):
    model = _model(EXPERTS, "float64")

    def make(models, block_tokens):
        return ReferenceExecutor(models, block_tokens)

    expected = on_executor(make({ModelRole.TARGET: model}, 16), _plain)
    for found in ranks.on_parts(model, _plain, make=make):
        for one, other in zip(found, expected, strict=True):
            assert np.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", [EXPERTS, LATENT], ids=["experts", "latent"])
def test_what_is_exchanged_is_what_is_priced(ranks, config):
    model = _model(config)

    def run(driver):
        driver.start(0, PROMPT)
        driver.run(driver.segment(0, 13, [7]))

    before = _counts(ranks)
    ranks.on_parts(model, run)
    sent = [(a - c, b - d) for (a, b), (c, d) in zip(_counts(ranks), before, strict=True)]
    priced = [_priced(model, ranks, rank, [(0, 13), (13, 14)]) for rank in range(len(sent))]
    assert [calls for _, calls in sent] == [work.link_messages for work in priced]
    total_bytes = sum(num_bytes for num_bytes, _ in sent)
    assert total_bytes == pytest.approx(sum(work.link_bytes for work in priced), rel=1e-9)


@pytest.mark.parametrize("case", quick(MIXTURES), ids=lambda case: f"{case.family}-{case.name}")
def test_a_rank_has_its_experts_and_all_else(case):
    spec, layout = describe(_config(case)).spec, ParallelLayout(expert=2)
    parts = [shard(spec, layout, rank).ops for rank in range(2)]
    for use in (use for op in lower(spec) for use in weight_uses(op)):
        rows = [
            {w.name: w for op in part for w in op_weights(op)}[use.weight.name].shape[0]
            for part in parts
        ]
        assert all(abs(own - use.weight.shape[0] / num_parts(use, layout)) < 1 for own in rows)


def test_a_model_without_experts_is_refused():
    with pytest.raises(SettingsError, match="no experts; lower expert_parallel_size"):
        shard(describe(CONFIG).spec, ParallelLayout(expert=2), 0)
