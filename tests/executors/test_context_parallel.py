"""Ranks that share contexts give the bits of one process, hold their part of KV, and exchange what
is priced."""

from dataclasses import replace

import numpy as np
import pytest
from tests.executors.rank_threads import RankThreads
from tests.executors.test_ranks import FOUR_HEADS, LOGITS, WIDE, _assert_same, _config, _model
from tests.parity.every_case import CASES, quick
from tests.tiny import CONFIG, EXPERTS, LATENT, SINKS, WINDOWED, Driver

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import on_load_format
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import BlockTableUpdate, ModelRole, Pass
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.executors.distributed.stages import layout_of
from ridgeline.executors.priced import priced_model
from ridgeline.kvcache import BlockPool
from ridgeline.models import describe, shard
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.op_cost import op_work
from ridgeline.roofline.work import total

LONG = {"max_position_embeddings": 2048}
NUM_BLOCKS = 384
TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 151, 1400)]
SAMPLED = SamplingParams(temperature=0.9, top_k=20)


class Contexts(Driver):
    """A driver whose block tables are as a pool of ``num_ranks`` makes them."""

    def __init__(self, executor, num_ranks):
        super().__init__(executor)
        self._pool = BlockPool(NUM_BLOCKS, num_ranks=num_ranks, run_blocks=32)

    def segment(self, slot, start, token_ids, *, fresh=False, **fields):
        made = super().segment(slot, start, token_ids, **fields)
        if not fresh:
            return made
        tables = (
            BlockTableUpdate(group=group, first=0, blocks=tuple(self._pool.allocate(70)))
            for group in range(1)
        )
        return made._replace(block_updates=tuple(tables))


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    ranks = RankThreads(request.param, layout=ParallelLayout(context=request.param))
    yield ranks
    ranks.close()


def _everything(driver):
    """Shared ranges from the start and after a context, a short one, a batch of both, a sampled
    sequence, replays, and drafts in a tree that are accepted over the end of a run."""
    first = driver.start(0, TOKENS[:300], outputs=LOGITS).logits
    short = driver.start(1, TOKENS[700:750], SAMPLED, outputs=LOGITS).logits
    both = driver.run(
        driver.segment(1, 50, TOKENS[750:758], outputs=LOGITS),
        driver.segment(0, 300, TOKENS[300:1010], outputs=LOGITS),
    ).passes[0]
    token = driver.run(driver.segment(0, 1010, [7]), driver.segment(1, 58, [9])).passes[0]
    replayed = driver.run(
        passes=[
            Pass(segments=(driver.segment(0, 1011, [7]), driver.segment(1, 59, [9])), num_steps=9)
        ]
    ).passes[0]
    # A draft for each token that may come, each with one after it: some are accepted.
    tree = _tree(driver)
    return (
        first,
        short,
        *(each.logits for each in both),
        *_tokens(token),
        *_tokens(replayed),
        *tree,
    )


def _tokens(results):
    return [np.array(each.token_ids) for each in results]


def _tree(driver):
    """From 1020 on: the last known token, then two drafts of which the second is right, and what
    follows it; the target's tokens are those of steps one by one on another sequence."""
    known = TOKENS[:1020]
    driver.start(2, known[:700])
    plain = [*driver.run(driver.segment(2, 700, known[700:])).passes[0][0].token_ids]
    for position in range(1020, 1025):
        plain += driver.run(driver.segment(2, position, [plain[-1]])).passes[0][0].token_ids
    wrong = [(token + 1) % 151 for token in plain]
    driver.run(driver.segment(0, 0, known[:640]))
    driver.run(driver.segment(0, 640, known[640:]))
    drafts = [wrong[1], plain[1], wrong[2], plain[2], wrong[3], plain[3]]
    parents = (-1, -1, 1, 1, 3, 3)
    found = driver.run(
        driver.segment(0, 1020, [plain[0], *drafts], num_drafts=6, parents=parents, outputs=LOGITS)
    ).passes[0][0]
    after = driver.run(driver.segment(0, 1024, [found.token_ids[-1]], outputs=LOGITS)).passes[0][0]
    assert list(found.token_ids) == plain[1:5]
    assert found.accepted == (1, 3, 5)
    return found.logits, after.logits


def _run(executor, num_ranks, run):
    executor.allocate_kv([NUM_BLOCKS])
    try:
        return run(Contexts(executor, num_ranks))
    finally:
        executor.close()


def _on_parts(ranks, model, run, **settings):
    def of_rank(group):
        part = model.part(ranks.layout, group.rank, group)
        return _run(CPUExecutor({ModelRole.TARGET: part}, 16, **settings), len(ranks.groups), run)

    return ranks.each(of_rank)


def _assert_equal(ranks, model, **settings):
    plain = CPUExecutor({ModelRole.TARGET: model}, 16, **settings)
    expected = _run(plain, len(ranks.groups), _everything)
    for found in _on_parts(ranks, model, _everything, **settings):
        _assert_same(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", [None, "int8", "int4"])
def test_every_format_gives_the_same_bits(ranks, dtype, form):
    _assert_equal(ranks, _model(WIDE | LONG, dtype, quantization=on_load_format(form)))


@pytest.mark.parametrize("kv", ["bfloat16", "int8", "int4", "fp8"])
def test_every_format_of_kv_gives_the_same_bits(ranks, kv):
    _assert_equal(ranks, _model(WIDE | LONG | {"head_dim": 32}), kv_cache_dtype=kv)


def _is_shared(config):
    try:
        shard(describe(config).spec, ParallelLayout(context=2), 0)
    except SettingsError:
        return False
    return True


# One of each family.
FULL = {
    case.family: case for case in CASES if "vision" not in case.name and _is_shared(_config(case))
}.values()


@pytest.mark.parametrize("case", quick(FULL), ids=lambda case: f"{case.family}-{case.name}")
def test_every_family_of_full_attention_gives_the_same_bits(case):
    model, layout = _model(_config(case) | LONG), ParallelLayout(context=2)
    ranks = RankThreads(2, layout=layout)
    try:
        _assert_equal(ranks, model)
    finally:
        ranks.close()


def test_what_is_exchanged_is_what_is_priced(ranks):
    """In bytes within 1%, of ranges that begin and end within blocks, and in calls exactly."""
    for config in (FOUR_HEADS | {"head_dim": 32}, LATENT, EXPERTS | {"head_dim": 16}):
        for kv in ("bfloat16", "int8"):
            _check_exchanges(ranks, _model(config | LONG), kv)


def _check_exchanges(ranks, model, kv):
    steps = [[(0, 300)], [(300, 1010), (0, 50)], [(1010, 1011), (50, 51)], [(51, 400)]]

    def run(driver):
        driver.start(0, TOKENS[:300])
        driver.run(
            driver.segment(0, 300, TOKENS[300:1010]),
            driver.segment(1, 0, TOKENS[:50], fresh=True),
            admissions=(driver.admit(1, TOKENS[:50]),),
        )
        driver.run(driver.segment(0, 1010, [7]), driver.segment(1, 50, [7]))
        driver.run(driver.segment(1, 51, TOKENS[51:400]))

    before = [group.counts() for group in ranks.groups]
    _on_parts(ranks, model, run, kv_cache_dtype=kv)
    after = [group.counts() for group in ranks.groups]
    part = model.part(ranks.layout, 0, ranks.groups[0])
    priced = replace(priced_model(part, "cpu", kv_cache_dtype=kv), layout=ranks.layout)
    work = total([op_work(op, make_batch(step), priced) for step in steps for op in part.ops])
    assert {new[1] - old[1] for new, old in zip(after, before, strict=True)} == {work.link_messages}
    sent = sum(new[0] - old[0] for new, old in zip(after, before, strict=True))
    assert sent == pytest.approx(len(ranks.groups) * work.link_bytes, rel=0.01)


def test_a_list_without_exchanges_is_priced_as_one_with_them():
    for config in (FOUR_HEADS, LATENT):
        model, layout = _model(config | LONG), ParallelLayout(context=3)
        listed = replace(model, ops=shard(model.spec, layout, 0).ops)
        for spans in ([(0, 400)], [(100, 900), (30, 40)], [(900, 901)]):
            found, expected = (
                total([op_work(op, make_batch(spans), priced) for op in priced.ops])
                for priced in (
                    replace(priced_model(each, "cpu"), layout=layout) for each in (model, listed)
                )
            )
            assert found.link_messages == expected.link_messages > 0
            assert found.link_bytes == pytest.approx(expected.link_bytes, rel=1e-12)


def test_a_rank_has_its_part_of_the_blocks_alone(ranks):
    model = _model(FOUR_HEADS | LONG)

    def of_rank(group):
        executor = CPUExecutor({ModelRole.TARGET: model.part(ranks.layout, group.rank, group)}, 16)
        executor.allocate_kv([NUM_BLOCKS])
        cache = executor.pools[ModelRole.TARGET]
        held = sum(memory.nbytes for memory in cache._memory)
        executor.close()
        return held

    whole = CPUExecutor({ModelRole.TARGET: model}, 16)
    block_bytes = whole.kv_layout().block_bytes[0]
    whole.close()
    assert ranks.each(of_rank) == [NUM_BLOCKS // len(ranks.groups) * block_bytes] * len(
        ranks.groups
    )


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (WINDOWED, "some of its layers attend within a window"),
        (SINKS, "some of its layers attend within a window"),
        (CONFIG | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
         "its layers keep states"),
    ],
)  # fmt: skip
def test_contexts_that_cannot_be_shared_are_refused_by_name(config, why):
    with pytest.raises(SettingsError, match=f"a {config['model_type']} model: {why}"):
        shard(describe(config).spec, ParallelLayout(context=2), 0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size does not work with context_parallel"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size does not work with context"),
        ({"expert_parallel_size": 2}, "expert_parallel_size does not work with context_parallel"),
        ({"kv_ram_tier_bytes": 10**6}, "kv_ram_tier_bytes does not work with context_parallel"),
        ({"block_tokens": 128}, "works with block_tokens of 16, 32 and 64, not 128"),
        ({"block_tokens": 48}, "works with block_tokens of 16, 32 and 64, not 48"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(settings, why):
    config = EngineConfig(context_parallel_size=2, **settings)
    with pytest.raises(SettingsError, match=why):
        layout_of(_model(CONFIG), config, "cpu")
