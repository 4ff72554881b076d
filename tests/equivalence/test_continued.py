"""An output goes on in another engine with the bits that it would have had in the first."""

from dataclasses import replace

import pytest
from tests.equivalence.conftest import opener
from tests.equivalence.test_grammars import FIXED_KEYS

from ridgeline import SamplingParams
from ridgeline.core.errors import ContextLengthError, InvalidRequestError
from ridgeline.engine.sample_output import text_pieces

PROMPT = "the cat sat on the mat the cat"
NUM_TOKENS = 11
SAMPLED = {"temperature": 1.2, "top_p": 0.95, "seed": 11}
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.3}
CASES = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED | {"n": 3, "logprobs": 2},
    "greedy penalties": {"temperature": 0.0, "logit_bias": {70: 2.0}} | PENALTIES,
    "sampled penalties": SAMPLED | PENALTIES | {"n": 2},
    "minimum": {"temperature": 1.5, "seed": 6, "min_tokens": 9, "logprobs": 0},
    "json": SAMPLED | {"structured_outputs": {"json": FIXED_KEYS}},
    "regex": PENALTIES | {"seed": 3, "structured_outputs": {"regex": "(ab|cd){2,9}"}},
    "prompt": SAMPLED | {"prompt_logprobs": 1},
}
ENGINES = [
    pytest.param("off", {}, id="plain"),
    pytest.param("combined", {"pool_tokens": 144, "max_num_batched_tokens": 13}, id="drafts-tight"),
]


def run(llm, wanted):
    """The outputs of requests, each of ``(params, first output tokens, sample)``, in one batch."""
    engine = llm._engine
    prompt = engine.info.tokenizer.encode(PROMPT)
    states, shown = [], {}
    for params, token_ids, sample in wanted:
        request = engine.requests.build(
            prompt, params, output_token_ids=token_ids, first_sample=sample
        )
        grammar = engine.speculation.prepare(request)
        states.append(engine.loop.add(request, grammar=grammar))
        pieces = text_pieces(token_ids, params, engine.info.tokenizer, prompt)
        shown[request.request_id] = "".join(pieces)
    while engine.loop.has_work:
        for chunk in engine.loop.step():
            if chunk.index == 0:
                shown[chunk.request_id] += chunk.text
        engine.loop.check_integrity()
    outputs = [state.output() for state in states]
    for output in outputs:  # what was shown before and what is shown now are the whole
        assert shown[output.request_id] == output.outputs[0].text
    return outputs


def stops_across(output):
    """A stop string whose characters come from two tokens of an output, and more."""
    text = output.outputs[0].text
    return text[len(text) // 2 - 1 : len(text) // 2 + 2]


@pytest.mark.parametrize(("speculation", "settings"), ENGINES)
def test_from_every_token_on(pairs, speculation, settings):
    """Every executor does; only this one gives the bits of log-probabilities again."""
    with opener(pairs, "cpu")(speculation, max_model_len=112, **settings) as llm:
        cases = [SamplingParams(max_tokens=NUM_TOKENS, **each) for each in CASES.values()]
        whole = run(llm, [(params, (), 0) for params in cases])
        for includes in (False, True):
            stop = stops_across(whole[0])
            cases.append(
                SamplingParams(
                    max_tokens=NUM_TOKENS,
                    temperature=0.0,
                    stop=(stop,),
                    include_stop_str_in_output=includes,
                )
            )
            whole += run(llm, [(cases[-1], (), 0)])
            assert whole[-1].outputs[0].stop_reason == stop
        wanted, expected = [], []
        for params, output in zip(cases, whole, strict=True):
            for sample in output.outputs:
                for k in range(len(sample.token_ids)):
                    wanted.append((replace(params, n=1), sample.token_ids[:k], sample.index))
                    expected.append((sample, output, k))
        for found, (sample, output, k) in zip(run(llm, wanted), expected, strict=True):
            (continued,) = found.outputs
            assert continued.token_ids == sample.token_ids
            assert continued.text == sample.text
            assert continued.finish_reason == sample.finish_reason
            assert continued.stop_reason == sample.stop_reason
            assert found.prompt_token_ids == output.prompt_token_ids
            assert found.prompt_logprobs == output.prompt_logprobs
            if sample.logprobs is not None:
                assert continued.logprobs == sample.logprobs[k:]
        assert len(wanted) > 100


def test_what_has_ended_does_not_go_on(llm):
    engine = llm._engine
    eos = min(engine.info.eos_token_ids)
    letters = llm._engine.info.tokenizer.encode("stop")

    def add(output, **settings):
        request = engine.requests.build(
            (1, 2), SamplingParams(temperature=0, **settings), output_token_ids=output
        )
        return engine.loop.add(request)

    for output, settings in (
        ((5, eos), {}),
        ((5, 6), {"max_tokens": 2}),
        ((5, 7), {"stop_token_ids": (7,)}),
        (letters, {"stop": ("to",)}),
        ((5,), {"n": 2}),
    ):
        with pytest.raises(InvalidRequestError, match=r"go on"):
            add(output, **settings)
    with pytest.raises(InvalidRequestError, match="output is not in the vocabulary"):
        add((10**6,))
    with pytest.raises(ContextLengthError):
        add((5,) * 255)
    assert not engine.loop.has_work
    engine.loop.check_integrity()
