"""Parts of a model on several ranks give the bits of one process, and exchange what is priced."""

import time
from math import prod

import numpy as np
import pytest
from tests.executors.rank_threads import RankThreads, on_executor
from tests.parity.every_case import CASES, quick
from tests.tiny import CONFIG, EXPERTS, LATENT, Driver

from ridgeline.core.arrays import cast
from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import on_load_format
from ridgeline.core.op_facts import Role
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole, Outputs, Pass
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.sharding import num_parts
from ridgeline.core.weight_uses import op_weights, weight_uses
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.priced import priced_model
from ridgeline.executors.reference.executor import ReferenceExecutor
from ridgeline.models import describe, lower, shard
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.op_cost import op_work
from ridgeline.roofline.work import total
from ridgeline.weights.dummy import dummy_moments

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33]
LOGITS = Outputs(sample=True, logits=True)
FOUR_HEADS = CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = FOUR_HEADS | {"hidden_size": 320, "intermediate_size": 416, "num_hidden_layers": 2}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    ranks = RankThreads(request.param)
    yield ranks
    ranks.close()


def _plain(driver: Driver):
    """A prompt with all its logits, two sequences in a batch, a sampled one, and a replay."""
    logits = driver.start(0, PROMPT, outputs=LOGITS).logits
    tokens = driver.decode(1, PROMPT[:5], 3, SamplingParams(temperature=0.9, top_k=20))
    both = driver.run(driver.segment(0, 13, [7]), driver.segment(1, 7, [9], outputs=LOGITS))
    replayed = driver.run(passes=[Pass(segments=(driver.segment(1, 8, [5]),), num_steps=4)])
    return logits, tokens, both.passes[0][1].logits, replayed.passes[0][0].token_ids


def _assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


def _model(config, dtype="float32", **fields):
    """Random weights, biases and gains among them."""
    spec = describe(config).spec
    rng, ops, weights = np.random.default_rng(5), lower(spec), {}
    for name, shape, mean, std in dummy_moments(ops):
        values = mean + (std or 0.2) * rng.standard_normal(shape, dtype=np.float32)
        weights[name] = cast(values, dtype)
    return ExecutorModel(spec=spec, ops=ops, weights=weights, dtype=dtype, **fields)


def _config(case):
    return {"model_type": case.family} | case.config


def _is_split(config, num_ranks):
    try:
        shard(describe(config).spec, ParallelLayout(tensor=num_ranks), 0)
    except SettingsError:
        return False
    return True


DENSE = [case for case in CASES if "vision" not in case.name and _is_split(_config(case), 2)]


@pytest.mark.parametrize("case", quick(DENSE), ids=lambda case: f"{case.family}-{case.name}")
def test_every_family_that_is_split_gives_the_same_bits(ranks, case):
    model = _model(_config(case))
    expected = on_executor(CPUExecutor({ModelRole.TARGET: model}, 16), _plain)
    for found in ranks.on_parts(model, _plain):
        _assert_same(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", [None, "int8", "int4", "int4-g64", "int4-g128"])
def test_every_format_gives_the_same_bits(ranks, dtype, form):
    model = _model(WIDE, dtype, quantization=on_load_format(form))
    expected = on_executor(CPUExecutor({ModelRole.TARGET: model}, 16), _plain)
    for found in ranks.on_parts(model, _plain):
        _assert_same(found, expected)


@pytest.mark.parametrize("config", [{}, EXPERTS, LATENT], ids=["dense", "experts", "latent"])
def test_the_reference_executor_runs_parts(ranks, config):
    heads = {"num_attention_heads": 4, "num_key_value_heads": config.get("num_key_value_heads", 2)}
    if config is LATENT:
        heads["num_key_value_heads"] = 4
    model = _model(CONFIG | config | heads, "float64")

    def make(models, block_tokens):
        return ReferenceExecutor(models, block_tokens)

    expected = on_executor(make({ModelRole.TARGET: model}, 16), _plain)
    for found in ranks.on_parts(model, _plain, make=make):
        for one, other in zip(found, expected, strict=True):
            assert np.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", [{}, EXPERTS, LATENT], ids=["dense", "experts", "latent"])
def test_what_is_exchanged_is_what_is_priced(ranks, config):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = _model(CONFIG | config | heads)
    spans = [(0, 13), (13, 14), (14, 15)]

    def run(driver):
        driver.start(0, PROMPT)
        for start, _ in spans[1:]:
            driver.run(driver.segment(0, start, [7]))

    before = [group.counts() for group in ranks.groups]
    ranks.on_parts(model, run)
    sent = [(a - c, b - d) for (a, b), (c, d) in zip(_counts(ranks), before, strict=True)]
    priced = [_priced(model, ranks, rank, spans) for rank in range(len(ranks.groups))]
    assert [calls for _, calls in sent] == [work.link_messages for work in priced]
    sent_bytes = sum(num_bytes for num_bytes, _ in sent)
    assert sent_bytes == pytest.approx(sum(work.link_bytes for work in priced), rel=1e-9)


def _counts(ranks):
    return [group.counts() for group in ranks.groups]


def _priced(model, ranks, rank, spans):
    group = ranks.groups[rank]
    part = priced_model(model.part(ranks.layout, rank, group), "cpu")
    return total([op_work(op, make_batch([span]), part) for span in spans for op in part.ops])


@pytest.mark.parametrize("case", quick(DENSE), ids=lambda case: f"{case.family}-{case.name}")
def test_a_rank_has_the_share_of_each_weight_that_is_priced(case):
    spec, layout = describe(_config(case)).spec, ParallelLayout(tensor=2)
    whole = {use.weight.name: use for op in lower(spec) for use in weight_uses(op)}
    parts = [shard(spec, layout, rank) for rank in range(2)]
    for name, use in whole.items():
        found = [
            prod(weight.shape[:1])
            for part in parts
            for weight in {w.name: w for op in part.ops for w in op_weights(op)}.values()
            if weight.name == name
        ]
        assert len(found) == 2, name
        # Whoever shares a norm over heads has its heads alone; it is priced as whole.
        if use.role is Role.GAIN or name.endswith("norm_bias"):
            continue
        share = prod(use.weight.shape[:1]) / num_parts(use, layout)
        assert all(abs(rows - share) < 1 for rows in found), name


@pytest.mark.parametrize(
    ("config", "num_ranks", "why"),
    [
        (CONFIG, 4, "4 ranks do not share its 6 heads and 2 KV heads equally"),
        (EXPERTS | {"num_attention_heads": 6}, 6, "6 ranks do not share|width of 5 is less than 6"),
        (FOUR_HEADS | {"model_type": "olmo2"}, 2, "go over all heads together"),
        (FOUR_HEADS | {"num_attention_heads": 64, "head_dim": 8, "num_key_value_heads": 64}, 64,
         "a width of 48 is less than 64 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_by_name(config, num_ranks, why):
    with pytest.raises(SettingsError, match=f"A {config['model_type']} model .*{why}"):
        shard(describe(config).spec, ParallelLayout(tensor=num_ranks), 0)


def test_many_tokens_are_exchanged_in_pieces_and_sleepers_are_woken():
    ranks = RankThreads(3)
    borders = (0, 1, 1000, 4096)
    rows = np.random.default_rng(1).standard_normal((3000, 4096), dtype=np.float32)

    def gather(group):
        if group.rank == 1:
            time.sleep(0.01)  # beyond the time for spinning
        own = rows[:, borders[group.rank] : borders[group.rank + 1]]
        whole = group.gather(own, borders)
        owners = np.arange(len(rows)) % 3
        mixed = group.gather_rows(np.where((owners == group.rank)[:, None], rows, 0), owners)
        return np.array_equal(whole, rows) and np.array_equal(mixed, rows)

    assert ranks.each(gather) == [True] * 3
    ranks.close()
