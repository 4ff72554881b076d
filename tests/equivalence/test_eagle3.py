"""What a drafter that reads hidden states proposes: what a plain forward over the accepted does."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tests.conftest import VOCAB
from tests.eagle3 import Drafter, head_config
from tests.tiny import CONFIG
from transformers import AutoModelForCausalLM

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import SettingsError
from ridgeline.core.plan import ModelRole
from ridgeline.core.result import SegmentResult

TEXT = "the cat sat on the mat the cat sat on the mat the cat"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
NUM_DRAFTS = 3


def own_tokens(pairs):
    """Those that the drafter has. A target that says no others gives it right more often."""
    steps = load_file(pairs / "full-eagle3" / "model.safetensors")["d2t"]
    return (steps + torch.arange(len(steps))).tolist()


def plain_proposals(pairs, token_ids, lengths):
    """The most likely drafts after so many tokens, with transformers' target, in float64."""
    target = AutoModelForCausalLM.from_pretrained(pairs / "full", dtype=torch.float64)
    tensors = load_file(pairs / "full-eagle3" / "model.safetensors")
    tensors = {
        name.replace("midlayer.", "layers.0."): each.double() if each.is_floating_point() else each
        for name, each in tensors.items()
    }
    config = head_config(CONFIG | {"vocab_size": VOCAB}, draft_vocab_size=8)
    drafter = Drafter(config, tensors, target.model.embed_tokens.weight.detach())
    own_ids = own_tokens(pairs)
    with torch.no_grad():
        states = target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    rows = drafter.project(torch.cat([states[layer][0] for layer in (0, 1, 2)], dim=-1))
    found = []
    for length in lengths:
        tokens, features, drafts = token_ids[1:length], rows[: length - 1], []
        for _ in range(NUM_DRAFTS):
            logits, own = drafter.logits(tokens, features)
            drafts.append(own_ids[int(logits[-1].argmax())])
            tokens, features = [*tokens, drafts[-1]], torch.cat([features, own[-1:]])
        found.append(tuple(drafts))
    return found


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 17}, {"enable_prefix_caching": False}], ids=str
)
def test_drafts_are_those_of_a_plain_forward_over_what_was_accepted(pairs, proposals, settings):
    settings = {"dtype": "float64", "block_tokens": 4, "executor": "reference"} | settings
    with LLM(
        str(pairs / "full"), speculation="eagle3", draft_model=str(pairs / "full-eagle3"),
        num_speculative_tokens=NUM_DRAFTS, **settings,
    ) as llm:  # fmt: skip
        greedy = replace(GREEDY, max_tokens=48, logit_bias=dict.fromkeys(own_tokens(pairs), 12.0))
        runs = []
        for _ in range(2):  # again, with a prefix from the cache
            proposals.clear()
            output = llm.generate(TEXT, greedy)[0]
            runs.append(list(proposals))
        token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert sum(output.outputs[0].num_accepted) > 3
    for found in runs:
        lengths = [length for length, _ in found]
        wanted = plain_proposals(pairs, token_ids, lengths)
        assert len(found) > 5
        short = [drafts[: len(each)] for (_, each), drafts in zip(found, wanted, strict=True)]
        assert [each for _, each in found] == short


def test_samples_of_one_prompt_have_its_drafter_s_kv(pairs, proposals):
    """Those that wait for the prompt to be computed draft as the first does."""
    with LLM(
        str(pairs / "full"), speculation="eagle3", draft_model=str(pairs / "full-eagle3"),
        executor="reference", dtype="float64", block_tokens=4, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        llm.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=8, n=3))
    by_length = {}
    for length, drafts in proposals:
        by_length.setdefault(length, []).append(drafts)
    assert max(map(len, by_length.values())) == 3
    assert all(len(set(drafts)) == 1 for drafts in by_length.values())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"executor": "cpu", "tensor_parallel_size": 2}, "tensor_parallel_size does not keep"),
        ({"executor": "cpu", "pipeline_parallel_size": 2}, "pipeline_parallel_size does not keep"),
        ({"executor": "cuda"}, "the cuda executor does not keep hidden states"),
        ({"draft_layers": 1}, "draft_layers has no effect"),
        ({"draft_model": None}, "needs draft_model, a drafter"),
    ],
    ids=str,
)
def test_what_such_a_drafter_cannot_do_is_refused_in_one_sentence(pairs, settings, words):
    settings = {
        "speculation": "eagle3", "draft_model": str(pairs / "full-eagle3"), "executor": "reference"
    } | settings  # fmt: skip
    with pytest.raises(SettingsError, match=words):
        LLM(str(pairs / "full"), **settings)


def test_a_drafter_without_a_token_proposes_nothing_more(pairs, monkeypatch):
    """A step whose drafts are missing is void, and the sequence goes on without."""
    with LLM(
        str(pairs / "full"), speculation="eagle3", draft_model=str(pairs / "full-eagle3"),
        executor="reference", dtype="float64", block_tokens=4,
    ) as llm:  # fmt: skip
        plain = llm.generate(TEXT, GREEDY)[0].outputs[0].token_ids
        executor = llm._engine.executor
        run = executor.forward

        def silent(segments, role, *rest):
            results = run(segments, role, *rest)
            return results if role is ModelRole.TARGET else tuple(SegmentResult() for _ in results)

        monkeypatch.setattr(executor, "forward", silent)
        assert llm.generate(TEXT, GREEDY)[0].outputs[0].token_ids == plain
