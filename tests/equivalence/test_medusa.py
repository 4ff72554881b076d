"""What Medusa's heads propose: what their formula gives over the last accepted token's features."""

import pytest
import torch
from safetensors.torch import load_file
from tests.medusa import head_logits
from transformers import AutoModelForCausalLM

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import SettingsError

TEXT = "the cat sat on the mat the cat sat on the mat the cat"
FEW = [97, 101, 110, 116]  # tokens: a target that says no others is guessed more often
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias=dict.fromkeys(FEW, 60.0)
)
NUM_DRAFTS = 3


def plain_proposals(pairs, token_ids, lengths):
    """The most likely drafts after so many tokens, with transformers' target, in float64."""
    target = AutoModelForCausalLM.from_pretrained(pairs / "full", dtype=torch.float64)
    tensors = load_file(pairs / "full-medusa" / "model.safetensors")
    tensors = {name: each.double() for name, each in tensors.items()}
    with torch.no_grad():
        hidden = target.model(torch.tensor([token_ids])).last_hidden_state[0]
        logits = [head_logits(tensors, head, hidden)[:, FEW] for head in range(NUM_DRAFTS)]
    return [tuple(FEW[int(each[length - 2].argmax())] for each in logits) for length in lengths]


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 17}], ids=str)
def test_drafts_are_those_of_the_heads_over_what_was_accepted(pairs, proposals, settings):
    settings = {"dtype": "float64", "block_tokens": 4, "executor": "reference"} | settings
    with LLM(
        str(pairs / "full"), speculation="medusa", draft_model=str(pairs / "full-medusa"),
        num_speculative_tokens=NUM_DRAFTS, **settings,
    ) as llm:  # fmt: skip
        runs = []
        for _ in range(2):  # again, with a prefix from the cache
            proposals.clear()
            output = llm.generate(TEXT, GREEDY)[0]
            runs.append(list(proposals))
        assert sum(output.outputs[0].num_accepted) > 3
        assert llm._engine.executor.kv_layout().groups == llm_groups(pairs)
    token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    for found in runs:
        wanted = plain_proposals(pairs, token_ids, [length for length, _ in found])
        assert len(found) > 5
        short = [drafts[: len(each)] for (_, each), drafts in zip(found, wanted, strict=True)]
        assert [each for _, each in found] == short


def llm_groups(pairs):
    """The KV groups of the model alone."""
    with LLM(str(pairs / "full"), executor="reference", dtype="float64", block_tokens=4) as llm:
        return llm._engine.executor.kv_layout().groups


def test_heads_are_refused_where_hidden_states_are_not_kept(pairs):
    with pytest.raises(SettingsError, match="does not keep hidden states"):
        LLM(
            str(pairs / "full"), speculation="medusa", draft_model=str(pairs / "full-medusa"),
            executor="cpu", tensor_parallel_size=2,
        )  # fmt: skip
