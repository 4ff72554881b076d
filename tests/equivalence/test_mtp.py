"""What a layer that predicts one token more proposes: what transformers' modules do over the
accepted."""

import pytest
from tests.mtp import final_hidden, plain_logits, write_mtp
from tests.parity.every_case import CASES

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import SettingsError

PROMPT = [5, 17, 150, 2, 2, 99, 31, 64, 7, 120, 45, 3, 17, 150, 2, 2]
FEW = [3, 17, 64, 99, 120, 150]  # tokens: a target that says no others gives it right more often
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logit_bias=dict.fromkeys(FEW, 60.0))
NUM_DRAFTS = 3


def plain_proposals(main, mtp, token_ids, lengths):
    """The most likely drafts after so many tokens, in float64."""
    main, mtp, found = main.double(), mtp.double(), []
    hidden = final_hidden(main, token_ids)
    for length in lengths:
        drafts = []
        for _ in range(NUM_DRAFTS):
            logits = plain_logits(main, mtp, token_ids[:length], drafts, hidden)[-1]
            drafts.append(max(FEW, key=lambda token: logits[token]))
        found.append(tuple(drafts))
    return found


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}], ids=str)
@pytest.mark.parametrize("name", ["mimo-plain", "deepseek_v3-groups"])
def test_drafts_are_those_of_a_plain_forward_over_what_was_accepted(
    tmp_path, proposals, name, settings
):
    case = next(case for case in CASES if case.id == name)
    main, mtp = write_mtp(case, tmp_path)
    settings = {"dtype": "float64", "block_tokens": 4, "executor": "reference"} | settings
    with LLM(
        str(tmp_path), speculation="mtp", num_speculative_tokens=NUM_DRAFTS, **settings
    ) as llm:
        runs = []
        for _ in range(2):  # again, with a prefix from the cache
            proposals.clear()
            output = llm.generate([PROMPT], GREEDY)[0].outputs[0]
            runs.append(list(proposals))
    assert sum(output.num_accepted) > 1  # chance, one in six
    for found in runs:
        wanted = plain_proposals(main, mtp, [*PROMPT, *output.token_ids], [n for n, _ in found])
        assert len(found) > 5
        short = [drafts[: len(each)] for (_, each), drafts in zip(found, wanted, strict=True)]
        assert [each for _, each in found] == short


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"executor": "cpu", "tensor_parallel_size": 2}, "tensor_parallel_size does not keep"),
        ({"executor": "cuda"}, "the cuda executor does not keep hidden states"),
        ({"draft_model": "another"}, "draft_model has no effect"),
    ],
    ids=str,
)
def test_what_such_a_layer_cannot_do_is_refused_in_one_sentence(pairs, settings, words):
    settings = {"speculation": "mtp", "executor": "reference"} | settings
    with pytest.raises(SettingsError, match=words):
        LLM(str(pairs / "full"), **settings)


@pytest.mark.parametrize(
    ("speculation", "head"),
    [
        ("combined", "mtp"),
        ("adaptive", "eagle3"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("combined", "eagle3"), ("adaptive", "mtp"), ("adaptive tree", "mtp"))
        ),
    ],
)
def test_what_reads_hidden_states_stands_in_for_a_draft_model(
    open_llm, pairs, executor, proposals, speculation, head
):
    """The adaptive drafter first looks at steps without drafts, whose features nobody reads."""
    if executor == "cuda":
        pytest.skip("it refuses what uses the target's KV to draft")
    drafter = {"draft_model": "mtp" if head == "mtp" else str(pairs / "full-eagle3")}
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
        for temperature in (0.0, 0.6)
    ]
    found = []
    for name, settings in (("off", {}), (speculation, drafter)):
        with open_llm(name, **settings) as llm:
            runs = [llm.generate(["a"] * 2, params) for _ in range(3)]
            found.append([[each.outputs[0].token_ids for each in run] for run in runs])
            llm._engine.loop.check_integrity()
    assert found[0] == found[1]
    assert proposals
