"""Each field of a spec is used: change just that one, and it is no longer the oracle's model."""

from dataclasses import replace

import numpy as np
import pytest
from tests.parity.every_case import CASES, TELLING
from tests.parity.ours import load, run
from tests.parity.perturb import can_be_lowered, changes, same_weights, weight_names
from tests.parity.test_logits import TOLERANCES

from ridgeline.core.errors import WeightsMismatchError
from ridgeline.models import lower
from ridgeline.weights import CheckpointWeights

pytestmark = pytest.mark.skipif(
    not __debug__, reason="`lower` asserts which specs it is for, which -O leaves out"
)
TELLING_CASES = pytest.mark.parametrize("case_id", TELLING)
# OLMo's epsilon is no key of its config, and a tenth of it is lost among roundings.
HIDDEN = {"olmo-clipped": ".eps: 1e-05"}


@TELLING_CASES
def test_every_number_counts(case_id, oracle_of):
    oracle = oracle_of(case_id)
    loaded = _load(case_id, oracle)
    spec = loaded.model.spec
    expected = oracle.logits[: len(oracle.prompt)]
    numeric = [
        change
        for change in changes(spec)
        if can_be_lowered(change.spec)
        and same_weights(spec, change.spec)
        and HIDDEN.get(case_id, "hidden: none") not in change.text
    ]
    assert len(numeric) > 20
    unused = []
    for change in numeric:
        model = replace(loaded.model, spec=change.spec, ops=lower(change.spec))
        logits = run(model, oracle.prompt, prompt_tokens=len(oracle.prompt))
        if np.abs(logits - expected).max() <= TOLERANCES["reference"]:
            unused.append(change.text)
    assert not unused


@TELLING_CASES
def test_every_shape_is_checked(case_id, oracle_of):
    oracle = oracle_of(case_id)
    loaded = _load(case_id, oracle)
    spec = loaded.model.spec
    others = [
        change.spec
        for change in changes(spec)
        if can_be_lowered(change.spec)
        and not same_weights(spec, change.spec)
        and weight_names(change.spec) <= loaded.definition.sources.keys()  # in the family's reach
    ]
    assert len(others) >= 6  # vocabulary, hidden size, heads, KV heads, head width, MLP width
    for changed in [*others, replace(spec, layers=spec.layers[:-1])]:
        with pytest.raises(WeightsMismatchError):
            _load_as(changed, loaded, oracle.folder)


@pytest.mark.parametrize("case_id", ["llama-biases", "llama-tied"])
def test_tied_head(case_id, oracle_of):
    oracle = oracle_of(case_id)
    loaded = load(oracle.folder)
    spec = replace(loaded.model.spec, tie_embeddings=not loaded.model.spec.tie_embeddings)
    if spec.tie_embeddings:
        model = replace(loaded.model, spec=spec, ops=lower(spec))
        logits = run(model, oracle.prompt, prompt_tokens=len(oracle.prompt))
        assert np.abs(logits - oracle.logits[: len(oracle.prompt)]).max() > TOLERANCES["reference"]
    else:
        with pytest.raises(WeightsMismatchError):
            _load_as(spec, loaded, oracle.folder)


def _load(case_id, oracle):
    case = next(case for case in CASES if case.id == case_id)
    return load(oracle.folder, max_model_len=case.max_model_len)


def _load_as(spec, loaded, folder):
    """Load the checkpoint as if its config had said ``spec``."""
    definition = replace(
        loaded.definition, spec=spec, num_mtp_layers=0
    )  # none of these files has one
    weights = CheckpointWeights(
        path=folder,
        ops=lower(spec),
        sources=definition.sources,
        ignored=definition.ignored,
        dtype=loaded.model.dtype,
    )
    return dict(weights.values())
