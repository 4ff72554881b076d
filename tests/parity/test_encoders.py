"""Hidden states, embeddings and scores of encoders equal to those of transformers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.parity.encoder_cases import (
    DECODER_CASE,
    ENCODER_CASES,
    make_model,
    random_texts,
)
from tests.parity.ours import load
from tests.parity.perturb import can_be_lowered, changes, same_weights
from tests.tiny import Driver

from ridgeline.core.config import EngineConfig
from ridgeline.core.plan import ModelRole, Outputs
from ridgeline.core.pooling import Pooling
from ridgeline.engine.llm import LLM
from ridgeline.executors import create_executor
from ridgeline.models import lower

TOLERANCE = 1e-5
CASES = pytest.mark.parametrize("case", ENCODER_CASES, ids=lambda case: case.name)
EXECUTORS = pytest.mark.parametrize("executor", ["reference", "cpu"])
SECOND_START = 30  # of a pair


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A case's folder, two sequences, and their hidden states by transformers; made once."""
    made = {}

    def make(case):
        if case.name not in made:
            folder = tmp_path_factory.mktemp(case.name)
            model = make_model(case, folder)
            generator = torch.Generator().manual_seed(5)
            token_ids = torch.randint(4, 199, (2, 50), generator=generator)
            settings = {}
            if case.has_types:
                types = torch.zeros_like(token_ids)
                types[0, SECOND_START:] = 1
                settings["token_type_ids"] = types
            with torch.no_grad():
                hidden = model(token_ids, **settings).last_hidden_state
            made[case.name] = folder, token_ids.tolist(), hidden.numpy()
        return made[case.name]

    return make


@EXECUTORS
@CASES
def test_pooled_hidden_states(case, executor, encoder):
    folder, token_ids, hidden = encoder(case)
    model = load(folder).model
    for pooling, expected in (
        (Pooling.CLS, hidden[:, 0]),
        (Pooling.LAST, hidden[:, -1]),
        (Pooling.MEAN, hidden.mean(axis=1)),
        (Pooling.MAX, hidden.max(axis=1)),
        (Pooling.MEAN_SQRT_LEN, hidden.sum(axis=1) / 50**0.5),
    ):
        found = _pooled(model, token_ids, pooling, executor, has_types=case.has_types)
        bound = TOLERANCE * max(1.0, float(np.abs(expected).max()))
        assert np.abs(found - expected).max() <= bound, pooling


@pytest.mark.skipif(
    not __debug__, reason="`lower` asserts which specs it is for, which -O leaves out"
)
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert-biases"])
def test_every_number_counts(name, encoder):
    case = next(case for case in ENCODER_CASES if case.name == name)
    folder, token_ids, hidden = encoder(case)
    model = load(folder).model
    expected, unused, count = hidden[:, 0], [], 0
    for change in changes(model.spec):
        if not (can_be_lowered(change.spec) and same_weights(model.spec, change.spec)):
            continue
        count += 1
        if any(word in change.text for word in ("bidirectional", "logit_", "head_bias")):
            continue  # of models that generate
        changed = replace(model, spec=change.spec, ops=lower(change.spec))
        found = _pooled(changed, token_ids, Pooling.CLS, "reference", has_types=case.has_types)
        if np.abs(found - expected).max() <= TOLERANCE:
            unused.append(change.text)
    assert count >= 10
    assert not unused


@CASES
def test_a_text_gets_the_same_bits_in_any_batch(case, encoder):
    folder, _, _ = encoder(case)
    texts = random_texts(24, seed=3, words=(1, 30))
    with LLM(str(folder), executor="cpu", max_num_batched_tokens=64) as llm:
        together = llm.embed(texts)
        alone = np.concatenate([llm.embed(text) for text in texts])
        assert llm.config.num_blocks == ()  # no KV cache
    np.testing.assert_array_equal(together, alone)
    assert np.linalg.norm(together, axis=1) == pytest.approx(1.0, abs=1e-6)


@EXECUTORS
@pytest.mark.parametrize("case", ENCODER_CASES[:-1], ids=lambda case: case.name)
def test_reranking_is_in_transformers_order(case, executor, tmp_path):
    model = make_model(case, tmp_path, suffix="ForSequenceClassification", num_labels=1)
    _compare_ranking(model, tmp_path, executor, has_types=case.has_types)


@EXECUTORS
def test_reranking_by_a_decoder(executor, tmp_path):
    model = make_model(DECODER_CASE, tmp_path, suffix="ForSequenceClassification", num_labels=1)
    _compare_ranking(model, tmp_path, executor, has_types=False)


def _compare_ranking(model, folder, executor, *, has_types):
    """100 documents for a query: scores within the tolerance, and the same order."""
    query, documents = "ab cd ef", random_texts(100, seed=9)
    with LLM(str(folder), executor=executor) as llm:
        ranked = llm.rerank(query, documents)
        pairs = [llm.tokenizer.encode_pair(query, document) for document in documents]
        assert llm.rerank(query, documents, top_n=3) == ranked[:3]
    logits = []
    with torch.no_grad():
        for token_ids, second_start in pairs:
            settings = {}
            if has_types:
                settings["token_type_ids"] = torch.tensor(
                    [[int(place >= second_start) for place in range(len(token_ids))]]
                )
            logits.append(float(model(torch.tensor([token_ids]), **settings).logits[0, 0]))
    expected = 1 / (1 + np.exp(-np.array(logits)))
    found = np.array([each.score for each in sorted(ranked, key=lambda each: each.index)])
    assert np.abs(found - expected).max() <= TOLERANCE
    assert np.std(expected) > 100 * TOLERANCE
    assert [each.index for each in ranked] == np.argsort(-expected, kind="stable").tolist()


def _pooled(model, token_ids, pooling, executor, *, has_types):
    made = create_executor({ModelRole.TARGET: model}, EngineConfig(executor=executor))
    try:
        made.allocate_kv([])
        driver = Driver(made)
        seconds = (SECOND_START if has_types else None, None)
        admissions = tuple(
            driver.admit(slot, ids, second_start=second)
            for slot, (ids, second) in enumerate(zip(token_ids, seconds, strict=True))
        )
        outputs = Outputs(pooled=pooling)
        segments = [
            driver.segment(slot, 0, ids, outputs=outputs) for slot, ids in enumerate(token_ids)
        ]
        (results,) = driver.run(*segments, admissions=admissions).passes
        return np.stack([result.pooled for result in results])
    finally:
        made.close()
