"""LongRoPE's frequencies equal those of transformers, on either side of the original length."""

import math

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.models import describe, inverse_frequencies, rope_attention_factor

SIZES = {
    "vocab_size": 50,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 1024,
    "pad_token_id": 0,
}
PAIRS = 9  # of heads of 24, three quarters of which are rotated
SCALING = {
    "type": "longrope",
    "short_factor": [1.0 + pair / 8 for pair in range(PAIRS)],
    "long_factor": [1.0 + pair**1.5 for pair in range(PAIRS)],
}
CONFIG = SIZES | {
    "model_type": "phi3",
    "rope_theta": 10_000.0,
    "rope_scaling": SCALING,
    "partial_rotary_factor": 0.75,
}


def rope_of(*, context=None, **changes):
    return describe(CONFIG | changes, context=context).spec.layers[0].attention.rope


@pytest.mark.parametrize("context", [1, 1024, 1025, None])
@pytest.mark.parametrize("more", [{}, {"factor": 2.5}, {"attention_factor": 1.7}, {"factor": 0.5}])
def test_equal_to_transformers(context, more):
    scaling = SCALING | more
    config = transformers.Phi3Config(
        **SIZES, rope_theta=10_000.0, rope_scaling=dict(scaling), partial_rotary_factor=0.75
    )
    theirs, factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=context or 4096)
    rope = rope_of(rope_scaling=scaling, context=context)
    assert rope.rotary_dim == 2 * PAIRS
    ours = inverse_frequencies(rope, sequence_length=0)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=3e-7)
    assert math.isclose(rope_attention_factor(rope), factor, rel_tol=1e-12)


@pytest.mark.parametrize("old", ["su", "yarn"])
def test_old_names(old):
    assert rope_of(rope_scaling=SCALING | {"type": old}) == rope_of()


def test_the_length_outside_of_the_section_counts():
    inner = {"rope_scaling": SCALING | {"original_max_position_embeddings": 77}}
    short, long = (tuple(SCALING[name]) for name in ("short_factor", "long_factor"))
    for changes, original in (({}, 1024), ({"original_max_position_embeddings": None}, 4096)):
        for context, factors in ((original, short), (original + 1, long)):
            assert rope_of(context=context, **inner, **changes).scaling.factors == factors


@pytest.mark.parametrize(
    "factors", [None, [1.0] * (PAIRS - 1), [1.0] * PAIRS + ["2"], [0.0] * PAIRS]
)
def test_factors_that_do_not_fit(factors):
    with pytest.raises(CorruptFileError, match="long_factor"):
        rope_of(rope_scaling=SCALING | {"long_factor": factors})


def test_an_odd_rotary_dim_is_refused():
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        rope_of(partial_rotary_factor=0.3)
