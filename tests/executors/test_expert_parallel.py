"""Ranks that share a model's experts give the bits of one process, and exchange what is priced."""

import numpy as np
import pytest
from tests.executors.rank_threads import RankThreads, Together, on_executor
from tests.executors.test_ranks import (
    PROMPT,
    _assert_same,
    _config,
    _counts,
    _model,
    _plain,
    _priced,
)
from tests.parity.every_case import CASES
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
from ridgeline.executors.reference.executor import ReferenceExecutor
from ridgeline.models import describe, lower, shard


def _has_experts(case):
    ops_of = lower(describe(_config(case)).spec)
    return any(isinstance(op, ops.MoE) for op in ops_of)


MIXTURES = [case for case in CASES if "vision" not in case.name and _has_experts(case)]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    ranks = RankThreads(request.param, layout=ParallelLayout(expert=request.param))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: f"{case.family}-{case.name}")
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


@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: f"{case.family}-{case.name}")
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
