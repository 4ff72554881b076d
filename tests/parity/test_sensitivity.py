"""Each field of a spec is used: change just that one, and the logits are no longer the oracle's."""

from dataclasses import replace

import numpy as np
import pytest
from ridgeline.core.errors import WeightsMismatchError
from ridgeline.models import lower
from ridgeline.weights import load_weights

from tests.parity.cases import TELLING
from tests.parity.ours import load, run
from tests.parity.perturb import NOT_NUMERIC, SHAPES, changes
from tests.parity.test_logits import TOLERANCE

TELLING_CASES = pytest.mark.parametrize("case_id", TELLING)


@TELLING_CASES
def test_every_number_counts(case_id, oracle_of):
    oracle = oracle_of(case_id)
    loaded = load(oracle.folder)
    expected = oracle.logits[: len(oracle.prompt)]
    numeric = [
        change for change in changes(loaded.model.spec) if change.field not in SHAPES | NOT_NUMERIC
    ]
    assert len(numeric) > 10
    unused = []
    for change in numeric:
        model = replace(loaded.model, spec=change.spec, ops=lower(change.spec))
        logits = run(model, oracle.prompt, prompt_tokens=len(oracle.prompt))
        if np.abs(logits - expected).max() <= TOLERANCE:
            unused.append(change.text)
    assert not unused


@TELLING_CASES
def test_every_shape_is_checked(case_id, oracle_of):
    oracle = oracle_of(case_id)
    loaded = load(oracle.folder)
    spec = loaded.model.spec
    specs = [change.spec for change in changes(spec) if change.field in SHAPES]
    assert len(specs) >= len(SHAPES)
    for changed in [*specs, replace(spec, layers=spec.layers[:-1])]:
        definition = replace(loaded.definition, spec=changed)
        with pytest.raises(WeightsMismatchError):
            load_weights(
                oracle.folder,
                ops=lower(changed),
                sources=definition.sources,
                ignored=definition.ignored,
                dtype=loaded.model.dtype,
            )


@pytest.mark.parametrize("case_id", ["llama-biases", "llama-tied"])
def test_tied_head(case_id, oracle_of):
    oracle = oracle_of(case_id)
    loaded = load(oracle.folder)
    spec = replace(loaded.model.spec, tie_embeddings=not loaded.model.spec.tie_embeddings)
    if "head" in loaded.model.weights:
        model = replace(loaded.model, spec=spec, ops=lower(spec))
        logits = run(model, oracle.prompt, prompt_tokens=len(oracle.prompt))
        assert np.abs(logits - oracle.logits[: len(oracle.prompt)]).max() > TOLERANCE
        return
    definition = replace(loaded.definition, spec=spec)
    with pytest.raises(WeightsMismatchError):
        load_weights(
            oracle.folder,
            ops=lower(spec),
            sources=definition.sources,
            ignored=definition.ignored,
            dtype=loaded.model.dtype,
        )
