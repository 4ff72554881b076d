"""Logits and greedy tokens equal to those of transformers, through the whole loading path."""

import numpy as np
import pytest
from tests.parity.every_case import CASES
from tests.parity.oracle import DECODED
from tests.parity.ours import load, run

from ridgeline.core.sampling_params import SamplingParams
from ridgeline.engine.llm import LLM

# By executor: native kernels sum each row's products in one order, where PyTorch sums by halves.
TOLERANCES = {"reference": 1e-4, "cpu": 3e-4}
ALL_CASES = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
ALL_EXECUTORS = pytest.mark.parametrize("executor", TOLERANCES)


@ALL_EXECUTORS
@ALL_CASES
def test_prefill(case, executor, oracle_of):
    oracle = oracle_of(case.id)
    with _llm(case, oracle, executor) as llm:
        logits = llm.logits(oracle.prompt)
    expected = oracle.logits[: len(oracle.prompt)]
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= TOLERANCES[executor]


@ALL_EXECUTORS
@ALL_CASES
def test_cached_decode(case, executor, oracle_of):
    oracle = oracle_of(case.id)
    model = load(oracle.folder, max_model_len=case.max_model_len).model
    logits = run(model, oracle.token_ids, prompt_tokens=len(oracle.prompt), name=executor)
    assert np.abs(logits - oracle.logits).max() <= TOLERANCES[executor]


@ALL_EXECUTORS
@ALL_CASES
def test_greedy_tokens(case, executor, oracle_of):
    oracle = oracle_of(case.id)
    params = SamplingParams(temperature=0.0, max_tokens=DECODED, ignore_eos=True)
    with _llm(case, oracle, executor) as llm:
        (output,) = llm.generate([oracle.prompt], params)
    tokens = output.outputs[0].token_ids
    for ours, theirs, logits in zip(
        tokens, oracle.greedy_token_ids, oracle.greedy_logits, strict=True
    ):
        if ours != theirs:
            assert logits[theirs] - logits[ours] <= 2 * TOLERANCES[executor], "not a tie"
            return  # what follows is another text


def _llm(case, oracle, executor):
    settings = {"executor": executor, "dtype": "float32", "max_model_len": case.max_model_len}
    return LLM(model=str(oracle.folder), **settings)
