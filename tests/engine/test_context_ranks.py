"""One model on ranks that share contexts: the tokens of one process, whatever is in the way."""

import pytest
from tests.conftest import VOCAB, write_tokenizer
from tests.engine.test_ranks import DIGITS, SAMPLED
from tests.equivalence.conftest import opener
from tests.tiny import CONFIG, EXPERTS
from tests.weights.gguf_export import write_checkpoint

from ridgeline import SamplingParams
from ridgeline.core.errors import InvalidRequestError, SettingsError
from ridgeline.core.kv_compression import KVCompression
from ridgeline.kernels.cpu.library import native_kernels_run

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="the cpu executor does not run")

LONG = {"vocab_size": VOCAB, "max_position_embeddings": 2048, "head_dim": 32}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


SLOW = pytest.mark.slow
BATCHED = {"max_num_batched_tokens": 700}  # several ranges in a step are shared


@pytest.fixture(scope="module")
def open_llm(tmp_path_factory):
    root = tmp_path_factory.mktemp("contexts")
    for name, config in (
        ("long", CONFIG | LONG),
        ("long-draft", CONFIG | LONG | {"num_hidden_layers": 1}),
        ("experts", EXPERTS | LONG),
    ):
        write_checkpoint(config, root / name)
        write_tokenizer(root / name)
    settings = {"pair": "long", "max_model_len": 1000, "max_num_batched_tokens": 200}
    return lambda speculation, **changes: opener(root, "cpu")(speculation, **settings | changes)


def _outputs(llm):
    """Prompts that share more than a run, sampled ones and one with a grammar; twice, so that the
    second time finds them cached."""
    common = [5 + token * token % 90 for token in range(530)]
    prompts = [common + [7 * n % 90 + 5] * (3 + 130 * n) for n in range(4)] + [common[:20]]
    found = []
    for _ in range(2):
        found += [each.outputs for each in llm.generate(prompts, SAMPLED)]
        found += [each.outputs for each in llm.generate(prompts[:2], GREEDY)]
        found += [each.outputs for each in llm.generate(prompts[:2], DIGITS)]
    return [(sample.token_ids, sample.text) for outputs in found for sample in outputs]


@pytest.mark.parametrize(
    ("speculation", "settings"),
    [
        ("off", {"dtype": "bfloat16", "pool_tokens": 768}),
        pytest.param(
            "off", {"decode_replay_s": 0.2, "quantization": "int8", "kv_cache_dtype": "int8"},
            marks=SLOW,
        ),
        ("ngram", {"quantization": "int4", "kv_cache_dtype": "int4", **BATCHED}),
        ("draft", {"quantization": "int8", "enable_prefix_caching": False}),
        pytest.param("draft tree", {"dtype": "bfloat16", "block_tokens": 32}, marks=SLOW),
        pytest.param("off", {"pair": "experts"}, marks=SLOW),
    ],
    ids=["preemption", "replay", "n-grams", "draft model", "trees", "experts"],
)  # fmt: skip
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=SLOW)])
def test_ranks_that_share_contexts_give_the_tokens_of_one_process(
    open_llm, speculation, settings, num_ranks
):
    with open_llm(speculation, **settings) as llm:
        expected = _outputs(llm)
    with open_llm(speculation, context_parallel_size=num_ranks, **settings) as llm:
        assert _outputs(llm) == expected
        executor, scheduler = llm._engine.executor, llm._engine.scheduler
        assert executor.num_ranks == num_ranks
        assert executor.expert_tokens() == {}
        assert "pool_tokens" not in settings or scheduler.num_preemptions > 0
        assert not settings.get("enable_prefix_caching", True) or (
            scheduler.prefix_cache.stats.hit_tokens > 0
        )
        scheduler.check_integrity()


def test_what_leaves_tokens_out_is_refused(open_llm):
    with open_llm("off", context_parallel_size=2) as llm:
        for method in (
            {"method": "streaming_llm", "window": 64},
            {"method": "snapkv", "budget": 99},
        ):
            params = SamplingParams(kv_compression=KVCompression(**method))
            with pytest.raises(InvalidRequestError, match="does not work with context_parallel"):
                llm.generate([[5, 6, 7]], params)


def test_other_executors_and_settings_are_refused(open_llm, tmp_path):
    with pytest.raises(SettingsError, match="kv_disk_tier_path does not work with context_paral"):
        open_llm("off", context_parallel_size=2, kv_disk_tier_path=str(tmp_path))
    with pytest.raises(SettingsError, match="context_parallel_size does not draft with the first"):
        open_llm("exit", context_parallel_size=2)
