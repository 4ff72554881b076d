"""Beams are those of transformers, which shares no code with ours."""

import pytest
import torch
import transformers
from tests.text.tokenizer_kinds import write_folder

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import ContextLengthError, InvalidRequestError
from ridgeline.engine.beam_search import BeamParams, best_of
from ridgeline.text import Tokenizer

PROMPTS = [[5, 17, 3, 99, 42], [7, 8], list(range(20, 60))]


@pytest.fixture(scope="module")
def oracle(model_folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    return model.eval()


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("eos", [0, 299, None])
def test_beams_are_those_of_transformers(llm, oracle, monkeypatch, width, length_penalty, eos):
    ends = frozenset() if eos is None else frozenset({eos})
    monkeypatch.setattr(llm, "eos_token_ids", ends)
    params = BeamParams(beam_width=width, max_tokens=9, length_penalty=length_penalty)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        found = oracle.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=9,
            do_sample=False,
            length_penalty=length_penalty,
            early_stopping=False,
            eos_token_id=eos,
            pad_token_id=1,
        )
        expected = []
        for row in found[:, len(prompt) :].tolist():
            stop = row.index(eos) + 1 if eos in row else len(row)
            expected.append(tuple(row[:stop]))
        assert output.outputs[0].token_ids == expected[0]
        if eos is None:
            assert [sample.token_ids for sample in output.outputs] == expected


def test_beams_end_at_the_context(model_folder):
    prompt = PROMPTS[2]
    with LLM(str(model_folder), max_model_len=len(prompt) + 5) as llm:
        found = [
            llm.beam_search(
                [prompt, PROMPTS[0]],
                BeamParams(beam_width=2, max_tokens=limit, ignore_eos=True),
            )
            for limit in (8, 64)
        ]
        for outputs, limit in zip(found, (8, 40), strict=True):
            lengths = [[len(s.token_ids) for s in output.outputs] for output in outputs]
            assert lengths == [[5, 5], [limit, limit]]
        with pytest.raises(ContextLengthError):
            llm.beam_search([list(range(len(prompt) + 5))])


def test_log_probabilities_are_those_of_the_model(llm):
    (output,) = llm.beam_search([PROMPTS[0]], BeamParams(beam_width=3, max_tokens=6))
    for sample in output.outputs:
        logits = torch.from_numpy(llm.logits([*PROMPTS[0], *sample.token_ids])).double()
        rows = logits.log_softmax(-1)[len(PROMPTS[0]) - 1 : -1]
        expected = rows[torch.arange(len(sample.token_ids)), list(sample.token_ids)].sum()
        assert sample.cumulative_logprob == pytest.approx(float(expected), abs=1e-4)
    assert llm._engine.loop._scheduler.prefix_cache.stats.hit_tokens > 0


def test_best_of(llm):
    params = SamplingParams(n=5, temperature=1.5, seed=1, max_tokens=6, logprobs=0)
    (output,) = llm.generate([PROMPTS[0]], params)
    best = best_of(output, 2)
    means = [s.cumulative_logprob / len(s.token_ids) for s in output.outputs]
    assert [s.cumulative_logprob / len(s.token_ids) for s in best.outputs] == sorted(means)[:-3:-1]
    with pytest.raises(InvalidRequestError, match="logprobs"):
        best_of(llm.generate([PROMPTS[0]], SamplingParams(n=2, max_tokens=2))[0], 1)
    with pytest.raises(InvalidRequestError, match="count"):
        best_of(output, -1)


@pytest.mark.parametrize("kind", ["llama2", "gpt2"])
def test_the_text_goes_on_from_the_prompt(llm, monkeypatch, tmp_path, kind):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, kind))
    monkeypatch.setattr(llm, "tokenizer", tokenizer)
    monkeypatch.setattr(llm, "eos_token_ids", frozenset({280}))
    params = BeamParams(beam_width=20, max_tokens=4)
    prompt = [290, 291, 292]
    (output,) = llm.beam_search([prompt], params)
    before = tokenizer.decode(prompt)
    for sample in output.outputs:
        shown = [token for token in sample.token_ids if token != 280]
        assert before + sample.text == tokenizer.decode([*prompt, *shown])


@pytest.mark.parametrize(
    "fields", [{"beam_width": 0}, {"beam_width": 65}, {"max_tokens": 0}, {"length_penalty": "1"}]
)
def test_bad_settings_are_refused(fields):
    with pytest.raises(InvalidRequestError):
        BeamParams(**fields)
