"""Factors of rotary frequencies, as a file has them, become the parameters that made them."""

import numpy as np
import pytest

from ridgeline.core.rope_spec import LongRopeScaling, RopeSpec
from ridgeline.weights.gguf.keys import Keys
from ridgeline.weights.gguf.rope import rope_content, rope_scaling

WIDTH, THETA = 128, 500_000.0


def factors_of(factor, low, high, original=8192):
    """By Llama 3.1's own loop: long waves are divided, short ones stay, those between are mixed."""
    found = []
    for pair in range(WIDTH // 2):
        turns = original * THETA ** (-2 * pair / WIDTH) / (2 * np.pi)
        if turns < low:
            found.append(factor)
        elif turns > high:
            found.append(1.0)
        else:
            smooth = (turns - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


def scaling_of(factors):
    return rope_scaling(Keys({}, "llama"), factors, head_dim=WIDTH, theta=THETA)


def test_bands_of_llama_3_are_found_whatever_they_are():
    for factor, low, high in ((8.0, 1.0, 4.0), (32.0, 1.0, 4.0), (8.0, 2.0, 16.0), (4.0, 0.5, 9.0)):
        found = scaling_of(factors_of(factor, low, high))
        assert (found["rope_type"], found["factor"]) == ("llama3", factor)
        assert found["low_freq_factor"] == pytest.approx(low, rel=1e-3)
        assert found["high_freq_factor"] == pytest.approx(high, rel=1e-3)


def test_two_lists_of_factors_are_two_tensors_and_the_length_that_they_change_at():
    scaling = LongRopeScaling(factors=(1.0, 2.0), attention_factor=1.5)
    lists = {"long_factor": [1.0, 2.0], "short_factor": [1.0, 1.25]}
    rope = RopeSpec(theta=THETA, rotary_dim=4, scaling=scaling)
    for config, length in (
        ({}, {}),
        ({"original_max_position_embeddings": 64}, {"rope.scaling.original_context_length": 64}),
    ):
        keys, tensors = rope_content(rope, lists, config)
        assert keys == {"rope.scaling.attn_factor": 1.5} | length
        for kind in ("long", "short"):
            assert tensors[f"rope_factors_{kind}.weight"].tolist() == lists[f"{kind}_factor"]


def test_factors_of_no_band_are_listed_and_those_that_change_nothing_are_none():
    assert scaling_of(np.ones(WIDTH // 2, np.float32)) is None
    odd = np.linspace(1, 3, WIDTH // 2, dtype=np.float32)
    for factors in (odd, odd[::-1].copy()):
        found = scaling_of(factors)
        assert found["rope_type"] == "longrope"
        assert np.allclose(found["long_factor"], factors) and found["factor"] == 1.0
