"""A request that sees its last tokens and its first: equal in any company, and blocks freed."""

import random

import pytest
from tests.equivalence.conftest import _write
from tests.tiny import CONFIG, WINDOWED

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.kv_compression import KVWindow
from ridgeline.core.plan import Segment
from ridgeline.kernels.cpu.library import native_kernels_run
from ridgeline.roofline.batch import batch_of, make_batch

SETTINGS = {
    "executor": "cpu", "dtype": "float32", "block_tokens": 16, "max_model_len": 256,
    "max_num_seqs": 4,
}  # fmt: skip
WINDOW = {"window": 40, "sinks": 4}
SNAP = {"method": "snapkv", "window": 16, "budget": 40}
HOW = {
    "chunked": {"max_num_batched_tokens": 24},
    "preempted": {"pool_blocks": 20, "others": True},
    "tiers": {"kv_ram_tier_bytes": 2**24, "pool_blocks": 24},
    "windowed layers": {},
    "speculation": {"speculation": "ngram"},
}

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="the cpu executor does not run")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compression")
    _write(folder / "plain", CONFIG)
    _write(folder / "window", WINDOWED)
    return folder


def prompts():
    rng = random.Random(0)
    return [[rng.randrange(290) for _ in range(length)] for length in (150, 7, 60, 120)]


def params(number, compression):
    return SamplingParams(
        n=2, temperature=0.8, seed=number, max_tokens=50, kv_compression=compression
    )


def outputs(llm, batches, *, compression=WINDOW, others=False):
    """Of the prompts of each batch, behind ``others`` that see everything."""
    found, plain = [], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for numbers in batches:
        before = [prompts()[3]] * 2 if others else []
        given = [*before, *(prompts()[number] for number in numbers)]
        results = llm.generate(
            given, [plain] * len(before) + [params(n, compression) for n in numbers]
        )
        found += [[s.token_ids for s in result.outputs] for result in results[len(before) :]]
    llm._loop.check_integrity()
    return found


@pytest.mark.parametrize(
    ("how", "compression"),
    [*((how, WINDOW) for how in HOW), *((how, SNAP) for how in HOW if how != "windowed layers")],
    ids=lambda value: value if isinstance(value, str) else value.get("method", "window"),
)
def test_the_same_in_any_company(folders, how, compression):
    model = str(folders / ("window" if how == "windowed layers" else "plain"))
    with LLM(model, **SETTINGS) as llm:
        alone = outputs(llm, [[number] for number in range(4)], compression=compression)
        block_bytes = llm.config.kv_cache_bytes // llm.config.num_blocks[0]
    settings = dict(HOW[how])
    others = settings.pop("others", False)
    if blocks := settings.pop("pool_blocks", None):
        settings["kv_cache_memory_bytes"] = blocks * block_bytes
    with LLM(model, **SETTINGS | settings) as llm:
        assert outputs(llm, [range(4)], compression=compression, others=others) == alone
        if how == "preempted":
            assert llm._engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("compression", [WINDOW, SNAP], ids=["window", "snapkv"])
def test_both_executors_agree_and_it_is_another_text(folders, compression):
    found = []
    for executor in ("cpu", "reference"):
        with LLM(str(folders / "plain"), **SETTINGS | {"executor": executor}) as llm:
            greedy = SamplingParams(temperature=0.0, max_tokens=30, kv_compression=compression)
            found.append(llm.generate(prompts()[:1], greedy)[0].outputs[0].token_ids)
            plain = SamplingParams(temperature=0.0, max_tokens=30)
            whole = llm.generate(prompts()[:1], plain)[0].outputs[0].token_ids
    assert found[0] == found[1] != whole


def test_a_window_that_reaches_everything_changes_nothing_and_is_not_cached(folders):
    with LLM(str(folders / "plain"), **SETTINGS) as llm:
        plain = SamplingParams(temperature=0.0, max_tokens=20)
        wide = SamplingParams(temperature=0.0, max_tokens=20, kv_compression={"window": 256})
        first = llm.generate(prompts()[:1], wide)[0]
        second = llm.generate(prompts()[:1], wide)[0]
        third = llm.generate(prompts()[:1], plain)[0]
    assert {first.num_cached_tokens, second.num_cached_tokens, third.num_cached_tokens} == {0}
    assert first.outputs[0].token_ids == third.outputs[0].token_ids


@pytest.mark.parametrize(
    ("compression", "most"),
    [
        # 4 tokens are in 1 block and 40 in 4 at the most; 2 more are written, of a step in flight.
        (WINDOW, 1 + 4 + 2),
        # 24 chosen tokens are in 2 blocks; from token 134 on there are 76 more, in 6 blocks.
        (SNAP, 2 + 6),
    ],
    ids=["window", "snapkv"],
)
def test_blocks_that_are_not_seen_are_free(folders, compression, most):
    with LLM(str(folders / "plain"), **SETTINGS) as llm:
        pool = llm._engine.scheduler._kv._cache.pools[0]
        long = SamplingParams(
            temperature=0.0, max_tokens=60, ignore_eos=True, kv_compression=compression
        )
        stream = llm.stream(prompts()[0], long)
        held = []
        for _ in stream:
            held.append(pool.num_blocks - pool.num_free)
    assert max(held[5:-1]) <= most


def test_the_price_is_of_what_is_seen():
    segments = [
        Segment(0, 100, 103, (1, 2, 3), window=KVWindow(4, 40)),
        Segment(1, 10, 12, (1, 2)),
    ]
    batch, plain = batch_of(segments), make_batch([(10, 12)])
    assert batch.visible_pairs(None) == 3 * 44 + plain.visible_pairs(None)
    assert batch.kv_rows(None) == 4 + 42 + 12
    assert batch.visible_pairs(9) == make_batch([(100, 103), (10, 12)]).visible_pairs(9)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"window": 0}, "kv_compression.window must"),
        ({"sinks": 4}, "must have a window"),
        ({"window": 9, "method": "h2o"}, "must be streaming_llm or snapkv"),
        ({"window": 9, "method": "snapkv"}, "must have a budget"),
        ({"budget": 9, "method": "snapkv"}, "kv_compression.budget must"),
        ({"budget": 99, "method": "snapkv", "sinks": 4}, "no sinks with snapkv"),
        ({"window": 9, "budget": 99}, "no budget with streaming_llm"),
        ({"windows": 9}, "may have method, window, sinks, budget"),
    ],
)
def test_mistakes(given, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        SamplingParams(kv_compression=given)
