"""Constrained outputs: the same with every drafter and without jump-forward, and always valid."""

import json

import jsonschema
import pytest
from tests.decoding.grammars.schemas import BY_HAND, generated
from tests.equivalence.conftest import DRAFTERS

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.request import FinishReason
from ridgeline.decoding.grammars.constraint import GrammarConstraint

FIXED_KEYS = {
    "type": "object",
    "properties": {
        "customer_identifier": {"type": "integer", "minimum": 0, "maximum": 99},
        "shipping_address_line": {"enum": ["home", "office"]},
        "expedited_delivery": {"type": "boolean"},
    },
    "required": ["customer_identifier", "shipping_address_line", "expedited_delivery"],
    "additionalProperties": False,
}
WANTED = [
    {"json": FIXED_KEYS},
    {"json": BY_HAND[-1]},
    {"regex": "(ab|cd){2,9}"},
    {"choice": ["yes", "no", "not at all"]},
    {"format": "date"},
    {"grammar": 'start: "x" ("+" /[0-9]/)*'},
    None,
]
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.2, "top_p": 0.9, "seed": 5, "frequency_penalty": 0.2},
    "minimum": {"temperature": 0.7, "seed": 6, "min_tokens": 6, "logprobs": 1, "n": 2},
}


QUICK = {("off", False), ("ngram", False), ("combined", True)}
CASES = [
    pytest.param(drafter, tight, marks=() if (drafter, tight) in QUICK else pytest.mark.slow)
    for drafter in ("off", *DRAFTERS)
    for tight in (False, True)
]


def _nothing_forced(constraint, max_tokens):
    return ()


def cases():
    return [
        SamplingParams(max_tokens=40, structured_outputs=wanted, **settings)
        for settings in SETTINGS.values()
        for wanted in WANTED
    ]


def generate(llm):
    params = cases()
    outputs = llm.generate(["the cat sat on the mat the cat"] * len(params), params)
    return [
        [(s.token_ids, s.text, s.finish_reason, len(s.logprobs or ())) for s in output.outputs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def expected(open_llm):
    """Without drafts, and without jump-forward."""
    with pytest.MonkeyPatch.context() as patch, open_llm("off") as llm:
        patch.setattr(GrammarConstraint, "forced", _nothing_forced)
        return generate(llm)


@pytest.mark.parametrize(("drafter", "tight"), CASES)
def test_outputs_are_those_without(open_llm, expected, drafter, tight):
    settings = {"max_model_len": 112, "pool_tokens": 128, "max_num_batched_tokens": 13}
    if not tight:
        settings = {}
    with open_llm(drafter, **settings) as llm:
        assert generate(llm) == expected
        llm._engine.loop.check_integrity()
        assert (llm._engine.loop._scheduler.num_preemptions > 0) == tight


def test_jump_forward_saves_steps_of_fixed_keys(open_llm, monkeypatch):
    params = SamplingParams(
        temperature=0.8, seed=1, max_tokens=200, structured_outputs={"json": FIXED_KEYS}
    )
    outputs, steps = [], []
    for forced in (True, False):
        if not forced:
            monkeypatch.setattr(GrammarConstraint, "forced", _nothing_forced)
        with open_llm("off") as llm:
            outputs.append(llm.generate("the cat", params)[0].outputs[0])
            steps.append(llm._engine.loop._last_step_id)
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(outputs[0].text), FIXED_KEYS)
    assert steps[0] < 0.7 * steps[1]


@pytest.mark.parametrize(
    "count", [40, pytest.param(400, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_the_embedded_model_writes_valid_json(count):
    """What it finishes is valid; a high temperature and a push to close make it varied."""
    schemas = [*BY_HAND, *(generated(1000 + seed) for seed in range(count - len(BY_HAND)))]
    finished = 0
    with LLM(speculation="ngram", max_num_seqs=32, max_model_len=256) as llm:
        ids = map(llm.tokenizer.token_to_id, ('"', "}", "]", '"}', '"]', "0"))
        closing = {token: 5.0 for token in ids if token is not None}
        for start in range(0, len(schemas), 32):
            params, checked = [], []
            for number, schema in enumerate(schemas[start : start + 32]):
                wanted = SamplingParams(
                    temperature=1.5,
                    seed=number,
                    max_tokens=100,
                    logit_bias=closing,
                    structured_outputs={"json": schema},
                )
                try:
                    llm._engine.speculation.constraints.prepare(wanted.structured_outputs)
                except InvalidRequestError:
                    continue
                params.append(wanted)
                checked.append(schema)
            for schema, output in zip(
                checked, llm.generate(["x = "] * len(params), params), strict=True
            ):
                sample = output.outputs[0]
                assert sample.finish_reason is not FinishReason.ERROR
                if sample.finish_reason is FinishReason.STOP:
                    finished += 1
                    jsonschema.Draft202012Validator(schema).validate(json.loads(sample.text))
    assert finished > 0.7 * count


def test_a_refused_grammar_leaves_nothing_behind(open_llm):
    with open_llm("off") as llm:
        with pytest.raises(InvalidRequestError, match="regex"):
            llm.generate("the cat", SamplingParams(structured_outputs={"regex": "((("}))
        assert llm._engine.loop._scheduler.num_waiting == 0
        llm._engine.loop.check_integrity()
