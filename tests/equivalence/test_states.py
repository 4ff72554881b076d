"""Models with states of sequences on the cpu executor: whatever is combined, bit for bit what each
prompt gives alone and whole."""

import json

import pytest
from tests.conftest import VOCAB
from tests.equivalence.conftest import _write
from tests.equivalence.test_combinations import SETTINGS, check_outputs, params, prompts
from tests.medusa import head_tensors, write_heads
from tests.parity.state_cases import STATE_CASES
from tests.tiny import CONFIG

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import SettingsError
from ridgeline.decoding.drafters.ngram import NgramDrafter
from ridgeline.kernels.cpu.library import native_kernels_run

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="the cpu executor does not run")
CASES = {case.id: case for case in STATE_CASES}
# Outputs that repeat themselves, so that drafts are right.
ASKED = [[token % 290 for token in range(first, 9 * first, 7)] for first in (3, 8, 20)]
BIASED = SamplingParams(
    temperature=0.0, max_tokens=60, logit_bias=dict.fromkeys((3, 17, 64, 99), 60.0)
)
# Of each kind of state, and of one beside attention.
TELLING = ("lfm2-biases", "qwen3_next-biases", "nemotron_h-dense", "falcon_h1-plain")


def open_llm(folder, **settings):
    return LLM(folder, load_format="dummy", **(SETTINGS | settings))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name in CASES:
        folder = tmp_path_factory.mktemp(name)
        config = CASES[name].config | {"model_type": CASES[name].family, "vocab_size": VOCAB}
        (folder / "config.json").write_text(json.dumps(config))
        made[name] = str(folder)
    return made


@pytest.fixture(scope="module")
def baselines(folders):
    """Outputs of every prompt and sample, each alone, and the least bytes that a sequence takes."""
    made = {}
    for name in TELLING:
        with open_llm(folders[name]) as llm:
            outputs = [
                [o.token_ids for o in llm.generate([each], params(n, samples=3))[0].outputs]
                for n, each in enumerate(prompts())
            ]
            made[name] = outputs, llm.config.kv_cache_bytes // SETTINGS["max_num_seqs"]
    return made


@pytest.mark.parametrize("name", TELLING)
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("cached", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("preempted", [False, True], ids=["roomy", "preempted"])
def test_every_way_is_bit_for_bit(name, folders, baselines, chunked, cached, preempted):
    """Batched, and with samples or aborts, in turn."""
    expected, sequence_bytes = baselines[name]
    settings = {"enable_prefix_caching": cached}
    if chunked:
        settings["max_num_batched_tokens"] = 24
    if preempted:
        settings["kv_cache_memory_bytes"] = int(1.5 * sequence_bytes)
    with open_llm(folders[name], **settings) as llm:
        for samples in (3, 1):
            check_outputs(llm, expected, samples=samples, aborts=samples == 1)
        llm._loop.check_integrity()
        scheduler = llm._engine.scheduler
        assert not preempted or scheduler.num_preemptions > 0
        assert not cached or scheduler.prefix_cache.stats.hit_tokens > 0


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft") / "model"
    _write(folder, CONFIG)
    for file in folder.glob("tokenizer*"):  # targets have none
        file.unlink()
    return str(folder)


@pytest.mark.parametrize("name", TELLING)
@pytest.mark.parametrize("speculation", ["recycling", "suffix", "draft", "combined", "adaptive"])
@pytest.mark.parametrize("preempted", [False, True], ids=["roomy", "preempted"])
def test_drafts_change_no_output(name, folders, baselines, draft, speculation, preempted):
    """Chunked and cached as well, with samples and aborts, and again where all is cached: what was
    rejected is in no state, and what was accepted in each."""
    expected, sequence_bytes = baselines[name]
    settings = {"enable_prefix_caching": True, "max_num_batched_tokens": 24}
    if speculation not in ("recycling", "suffix"):
        settings["draft_model"] = draft
    if preempted:
        settings["kv_cache_memory_bytes"] = int(2.5 * sequence_bytes)
    with open_llm(
        folders[name], speculation=speculation, num_speculative_tokens=3, **settings
    ) as llm:
        for samples in (3, 1, 1):
            check_outputs(llm, expected, samples=samples, aborts=samples == 1)
        llm._loop.check_integrity()
        scheduler = llm._engine.scheduler
        assert scheduler.prefix_cache.stats.hit_tokens > 0
        assert not preempted or scheduler.num_preemptions > 0
        assert speculation == "adaptive" or llm.speculation().num_drafted > 0


@pytest.mark.parametrize("name", TELLING)
def test_what_lags_is_taken_in_once_where_a_step_is_repeated(name, folders, monkeypatch):
    """By a drafter that rests after each proposal, so that the steps behind it are replayed."""
    proposes, proposed = NgramDrafter.propose, []

    def propose(drafter, slot, most):
        draft = proposes(drafter, slot, most)
        proposed.append(len(draft.token_ids))
        return draft

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    monkeypatch.setattr(NgramDrafter, "rest_steps", lambda _: 5 if any(proposed[-1:]) else 0)
    plain = SamplingParams(temperature=0.0, max_tokens=60)
    settings = {"enable_prefix_caching": True, "max_num_seqs": 1}
    with open_llm(folders[name], **settings) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate(ASKED, plain)]
    with open_llm(folders[name], speculation="ngram", **settings) as llm:
        assert [each.outputs[0].token_ids for each in llm.generate(ASKED, plain)] == expected
        assert llm.speculation().num_accepted > 0


@pytest.mark.parametrize("name", TELLING)
@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_accepted_drafts_change_no_output(name, folders, executor):
    """Nor where they were found in the cache."""
    settings = {"executor": executor, "dtype": "float32" if executor == "cpu" else "float64"}
    with open_llm(folders[name], **settings) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate(ASKED, BIASED)]
    settings |= {"enable_prefix_caching": True, "block_tokens": 16}
    with open_llm(folders[name], speculation="ngram", **settings) as llm:
        for _ in range(2):
            outputs = [each.outputs[0] for each in llm.generate(ASKED, BIASED)]
            assert [each.token_ids for each in outputs] == expected
            assert sum(sum(each.num_accepted) for each in outputs) > 20
        turn = [*ASKED[0], *expected[0], 5, 6, 7]
        again = llm.generate([turn], BIASED)[0]
        assert again.num_cached_tokens > len(ASKED[0]) + 30  # checkpoints among drafts
    with open_llm(folders[name], **settings) as llm:
        plain = llm.generate([turn], BIASED)[0].outputs[0].token_ids
    assert plain == again.outputs[0].token_ids


@pytest.mark.parametrize("name", TELLING)
def test_the_second_turn_computes_one_turn_and_less_than_a_block(name, folders):
    """A conversation of whole turns: of the turns before, nothing but a part of a block is computed
    again, and the answer is that of a run without a cache."""
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    prompt = [token % 290 for token in range(0, 280, 7)]
    with open_llm(folders[name], enable_prefix_caching=True) as llm:
        first = llm.generate([prompt], greedy)[0].outputs[0].token_ids
        turn = [*prompt, *first, *range(30, 45)]
        second = llm.generate([turn], greedy)[0]
        computed = len(turn) - second.num_cached_tokens
    assert computed <= 1 + 15 + SETTINGS["block_tokens"] - 1
    with open_llm(folders[name]) as llm:
        assert llm.generate([turn], greedy)[0].outputs[0].token_ids == second.outputs[0].token_ids


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"speculation": "exit"}, "speculation exit"),
        ({"speculation": "lookahead"}, "speculation lookahead"),
        ({"speculation": "ngram", "draft_shape": "tree"}, "draft_shape tree"),
        ({"kv_ram_tier_bytes": 2**20, "enable_prefix_caching": True}, "kv_ram_tier_bytes"),
        ({"executor": "cuda"}, "the cuda executor"),
    ],
)
def test_what_does_not_work_is_refused_by_name(folders, settings, named):
    with pytest.raises(SettingsError, match=f"{named} does not work .* lfm2"):
        open_llm(folders["lfm2-plain"], **settings)


def test_a_drafter_that_reads_hidden_states_is_refused_by_name(folders, tmp_path):
    hidden = CASES["lfm2-plain"].config["hidden_size"]
    write_heads(tmp_path / "heads", head_tensors(hidden, VOCAB))
    with pytest.raises(SettingsError, match=r"reads hidden states does not work .* lfm2"):
        open_llm(
            folders["lfm2-plain"], speculation="medusa", draft_model=str(tmp_path / "heads"),
            num_speculative_tokens=3,
        )  # fmt: skip
