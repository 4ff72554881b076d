"""Frequencies equal those of transformers to float32 rounding."""

import numpy as np
import pytest
import torch

from ridgeline.models import describe, inverse_frequencies, rope_attention_factor

transformers = pytest.importorskip("transformers")

MAX_POSITION = 128
SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-exact": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "beta_fast": 4,
        "beta_slow": 2,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
    "yarn-factor": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.7,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_equals_transformers(scaling, head_dim, theta):
    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITION,
        rope_theta=theta,
        rope_scaling=SCALINGS[scaling],
        num_hidden_layers=1,
    )
    rope = describe(config.to_dict()).spec.layers[0].attention.rope
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    for length in (1, MAX_POSITION, MAX_POSITION + 1, 300):
        theirs(torch.zeros(1), torch.arange(length)[None])
        ours = inverse_frequencies(rope, sequence_length=length)
        assert ours.dtype == np.float32
        assert ours.shape == (head_dim // 2,)
        # Two roundings of powers, in different libraries.
        np.testing.assert_array_max_ulp(ours, theirs.inv_freq.numpy(), maxulp=4)
        assert rope_attention_factor(rope) == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_only_dynamic_depends_on_the_length():
    def frequencies(scaling, length):
        config = {"model_type": "llama", **SHAPE, "rope_scaling": SCALINGS[scaling]}
        rope = describe(config).spec.layers[0].attention.rope
        return inverse_frequencies(rope, sequence_length=length)

    for scaling in SCALINGS:
        same = np.array_equal(frequencies(scaling, 1), frequencies(scaling, 4 * MAX_POSITION))
        assert same == (scaling != "dynamic")
    np.testing.assert_array_equal(frequencies("dynamic", 1), frequencies("dynamic", MAX_POSITION))


SHAPE = {
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": MAX_POSITION,
}
