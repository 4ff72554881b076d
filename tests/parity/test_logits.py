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
def test_cached_decode(case, executor, oracle_of):
    oracle = oracle_of(case.id)
    model = load(oracle.folder, max_model_len=case.max_model_len).model
    logits = run(model, oracle.token_ids, prompt_tokens=len(oracle.prompt), name=executor)
    assert np.abs(logits - oracle.logits).max() <= TOLERANCES[executor]


@pytest.mark.parametrize("executor", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
@ALL_CASES
def test_prefill_and_greedy_tokens_of_an_engine(case, executor, oracle_of):
    oracle, most = oracle_of(case.id), TOLERANCES[executor]
    settings = {"executor": executor, "dtype": "float32", "max_model_len": case.max_model_len}
    params = SamplingParams(temperature=0.0, max_tokens=DECODED, ignore_eos=True)
    with LLM(model=str(oracle.folder), **settings) as llm:
        logits = llm.logits(oracle.prompt)
        (output,) = llm.generate([oracle.prompt], params)
    expected = oracle.logits[: len(oracle.prompt)]
    assert logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= most
    for ours, theirs, logits_V in zip(
        output.outputs[0].token_ids, oracle.greedy_token_ids, oracle.greedy_logits, strict=True
    ):
        if ours != theirs:
            assert logits_V[theirs] - logits_V[ours] <= 2 * most, "not a tie"
            return  # what follows is another text
