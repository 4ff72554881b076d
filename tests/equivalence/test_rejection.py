"""Rejection sampling in the engine: outputs are distributed as without drafts.

The models' attention gives nothing, so that a token depends on the one before it alone, and the
probabilities of all transitions can be computed. How often each occurred in long outputs is
compared with them by chi-square. Wrong rules are put in the engine's place, and are caught.
"""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import write_tokenizer
from tests.eagle3 import head_config, head_tensors, write_head
from tests.equivalence.conftest import _write
from tests.tiny import CONFIG

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequestError, SettingsError
from ridgeline.decoding import History, process_logits, rejection
from ridgeline.decoding.sampling import softmax

VOCAB = 300
LENGTH = 100  # tokens of an output
QUICK, FULL = 2_400, 200_000
LETTERS = {"structured_outputs": {"regex": "[a-e]{2000}"}}
FEW = {"logit_bias": dict.fromkeys(range(10, 16), 60.0)}  # many draws for each transition
SETTINGS = {  # hot enough for logits of a tiny model to leave a choice
    "plain": {"temperature": 4.0, **FEW},
    "hot, top-p": {"temperature": 6.0, "top_p": 0.9, **FEW},
    "cold, top-k": {"temperature": 3.0, "top_k": 4, "min_p": 0.05, **FEW},
    "grammar": {"temperature": 5.0, **LETTERS},
}
ENGINES = {"roomy": {}, "tight": {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 20}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target whose next token depends on the last one, and a draft that is often wrong."""
    root = tmp_path_factory.mktemp("bigrams")
    for name, noise in (("target", 0.0), ("draft", 0.5)):
        _write(root / name, CONFIG, noise=noise)
        write_tokenizer(root / name)
        path = root / name / "model.safetensors"
        tensors = load_file(path)
        save_file({k: v * 0 if "o_proj" in k else v for k, v in tensors.items()}, path)
    config = head_config(CONFIG | {"vocab_size": VOCAB})
    write_head(root / "eagle3", config, head_tensors(config))
    return root


def open_llm(folders, speculation, executor, **settings):
    if speculation in ("draft", "combined", "adaptive"):
        settings["draft_model"] = str(folders / "draft")
    if speculation == "eagle3":
        settings["draft_model"] = str(folders / "eagle3")
    return LLM(
        str(folders / "target"),
        executor=executor,
        speculation=speculation,
        num_speculative_tokens=3,
        verification="rejection",
        max_num_seqs=32,
        **settings,
    )


def transitions(llm, params, num_draws):
    """How often each token followed each: int64 ``[V, V]``, over at least so many draws."""
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.long)
    while counts.sum() < num_draws:
        prompts = [[10 + number] for number in range(6)]
        for output in llm.generate(prompts, params):
            for sample in output.outputs:
                tokens = torch.tensor([output.prompt_token_ids[-1], *sample.token_ids])
                counts.index_put_((tokens[:-1], tokens[1:]), torch.tensor(1), accumulate=True)
    return counts


def probabilities(llm, params):
    """Of each token after each, ``[V, V]``."""
    allowed = None
    if params.structured_outputs is not None:
        texts = [llm.tokenizer.decode([index]) for index in range(VOCAB)]
        allowed = np.array([set(text) <= set("abcde") and text != "" for text in texts])
    logits = np.concatenate([llm.logits([token]) for token in range(VOCAB)])
    history = History(token_ids=(), num_prompt_tokens=0)
    rows = [softmax(process_logits(row, params, history, mask_V=allowed)) for row in logits]
    return torch.from_numpy(np.stack(rows))


def deviation(counts, p):
    """Standard deviations of chi-square from its mean (Wilson and Hilferty 1931), given the rows'
    sums."""
    assert counts[p == 0].sum() == 0, "an impossible token was drawn"
    expected = counts.sum(1, keepdim=True) * p
    kept = expected > 5
    rest, rest_expected = (torch.where(kept, 0.0, x).sum(1) for x in (counts.double(), expected))
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    pooled = rest_expected > 5
    statistic += float(((rest - rest_expected)[pooled] ** 2 / rest_expected[pooled]).sum())
    rows = int((kept.any(1)).sum())
    degrees = int(kept.sum()) + int(pooled.sum()) - rows
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def measured(folders, speculation, executor, setting, engine, num_draws):
    params = SamplingParams(n=4, max_tokens=LENGTH, ignore_eos=True, **SETTINGS[setting])
    with open_llm(folders, speculation, executor, **ENGINES[engine]) as llm:
        counts = transitions(llm, params, num_draws)
        llm._engine.loop.check_integrity()
        figures = llm.speculation()
        assert figures.num_accepted > num_draws / 100
        assert figures.num_drafted > 1.1 * figures.num_accepted
        if engine == "tight":
            assert llm._engine.scheduler.num_preemptions > 0
        return deviation(counts, probabilities(llm, params))


CASES = [
    ("draft", "cpu", "plain", "tight"),
    ("combined", "reference", "grammar", "roomy"),
    ("eagle3", "cpu", "plain", "roomy"),
    ("mtp", "cpu", "hot, top-p", "roomy"),
    ("draft", "cpu", "hot, top-p", "roomy"),
    ("combined", "cpu", "cold, top-k", "tight"),
    ("ngram", "reference", "plain", "roomy"),
    ("exit", "cpu", "plain", "roomy"),
]


QUICK_CASES = [CASES[0], ("combined", "cpu", "grammar", "roomy"), CASES[2]]


@pytest.mark.parametrize("case", QUICK_CASES, ids=" ".join)
def test_transitions_are_those_of_the_target(folders, case):
    assert measured(folders, *case, QUICK) < 4


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_transitions_over_many_draws(folders, case):
    assert measured(folders, *case, FULL) < 4


def forgets_what_was_drafted(p_NV, q_NV):
    return p_NV


def forgets_how_likely_the_draft_was(p_NV, q_NV, drafts_N, uniform_N):
    return uniform_N < p_NV[np.arange(len(drafts_N)), drafts_N]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("residual", forgets_what_was_drafted), ("accepts", forgets_how_likely_the_draft_was)],
)
def test_wrong_rules_are_caught(folders, monkeypatch, name, wrong):
    monkeypatch.setattr(rejection, name, wrong)
    assert measured(folders, *CASES[0], QUICK) > 5


def test_greedy_outputs_are_those_without_speculation(folders):
    params = SamplingParams(temperature=0.0, max_tokens=40)
    outputs = []
    for settings in ({}, {"speculation": "draft", "verification": "rejection"}):
        draft = {"draft_model": str(folders / "draft")} if settings else {}
        with LLM(str(folders / "target"), **settings, **draft) as llm:
            outputs.append(llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids)
    assert outputs[0] == outputs[1]


def test_what_cannot_hold_is_refused_by_name(folders):
    with pytest.raises(SettingsError, match="verification"):
        LLM(str(folders / "target"), verification="rejection")
    with pytest.raises(SettingsError, match="verification must be one of"):
        LLM(str(folders / "target"), speculation="ngram", verification="typical")
    with (
        open_llm(folders, "ngram", "auto") as llm,
        pytest.raises(InvalidRequestError, match="seed cannot hold with verification='rejection'"),
    ):
        llm.generate([[5]], SamplingParams(seed=1, temperature=1))
