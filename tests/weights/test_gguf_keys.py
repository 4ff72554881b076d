"""What is read of a GGUF file's keys, and what is written of them."""

from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.weights.gguf.config import config_of
from ridgeline.weights.gguf.decoder_config import MAX_LAYERS, for_each_layer, layer_types
from ridgeline.weights.gguf.keys import Keys
from ridgeline.weights.gguf.rope import rope_scaling
from ridgeline.weights.gguf.values import Cursor, encode_value, read_metadata


def keys(**values) -> Keys:
    return Keys({f"a.{name}": value for name, value in values.items()}, "a")


@pytest.mark.parametrize(
    "value",
    [
        True, "é", 7, 0.5, np.int64(-3), np.array([1, -2, 3], np.int16),
        np.array([0.5, 2.0], np.float32), np.array([True, False, True]), ["a", "", "bc"],
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_that_is_written_is_read_again(value):
    name = b"key"
    data = len(name).to_bytes(8, "little") + name + encode_value(value)
    found = read_metadata(Cursor(BytesIO(data), len(data)), 1)["key"]
    assert np.array_equal(found, value)
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype


def test_a_wrong_key_is_named_with_what_it_is():
    for wrong, told in (({}, "it is absent"), ({"n": "x"}, "it is 'x'"), ({"n": 0}, "it is 0")):
        with pytest.raises(CorruptFileError, match=rf"must give a\.n as .*{told}"):
            keys(**wrong).integer("n")
    with pytest.raises(UnsupportedModelError, match=r"a\.n for each layer"):
        keys(n=np.array([1, 2])).integer("n")
    for wrong in (float("nan"), True, "x", None):
        with pytest.raises(CorruptFileError, match=r"a\.n"):
            keys(n=wrong).number("n")
    assert keys(n=float(np.float32(0.1))).number("n") == 0.1
    assert [keys(n=n).integer("n") for n in (1, 2**31 - 1)] == [1, 2**31 - 1]
    for wrong in (0, 2**31, True, 1.0):
        with pytest.raises(CorruptFileError):
            keys(n=wrong).integer("n")
    assert (keys().integer("n", default=5), keys(n=0).integer("n", minimum=0)) == (5, 0)
    assert (keys().text("n", default="b"), keys(n="c").text("n", default="b")) == ("b", "c")


def test_a_number_for_each_layer_is_one_for_all_or_a_list_of_as_many():
    assert for_each_layer(keys(block_count=3, n=5), "n") == (5, 5, 5)
    assert for_each_layer(keys(block_count=3, n=np.array([1, 0, 2])), "n") == (1, 0, 2)
    for wrong in (np.array([1, 2]), np.array([1, -1, 0]), np.array([0.5, 1, 1]), None, -1):
        with pytest.raises(CorruptFileError):
            for_each_layer(keys(block_count=3, n=wrong), "n")
    assert len(for_each_layer(keys(block_count=MAX_LAYERS, n=1), "n")) == MAX_LAYERS
    with pytest.raises(CorruptFileError, match="claims"):
        for_each_layer(keys(block_count=MAX_LAYERS + 1, n=1), "n")


def test_layers_see_everything_by_turns_or_as_the_file_says():
    def sees(num_layers, default=3, **values):
        found = layer_types(keys(**values), num_layers, default=default)
        return [kind == "full_attention" for kind in found]

    name = "attention.sliding_window_pattern"
    assert sees(7) == [False, False, True, False, False, True, False]
    assert sees(4, **{name: 2}) == [False, True, False, True]
    assert sees(3, **{name: np.array([True, False, False])}) == [False, True, True]
    assert len(sees(MAX_LAYERS)) == MAX_LAYERS
    for num_layers, pattern in ((MAX_LAYERS + 1, 2), (3, np.array([True, False]))):
        with pytest.raises(CorruptFileError):
            sees(num_layers, **{name: pattern})


def test_what_a_file_leaves_out_or_sets_to_0_the_model_lacks():
    def config(architecture, **values):
        sizes = ("embedding_length", "block_count", "feed_forward_length", "context_length")
        sizes += ("attention.head_count",)
        values = dict.fromkeys(sizes, 8) | {"attention.layer_norm_rms_epsilon": 1e-5} | values
        content = SimpleNamespace(
            metadata={f"{architecture}.{name}": value for name, value in values.items()},
            names=lambda: ("token_embd.weight", "output.weight"),
            shape=lambda _: (100, 8),
            vector=lambda _: None,
            format_name=lambda _: "F32",
        )
        return config_of(content, architecture)

    experts, window = "expert_count", "attention.sliding_window"
    assert config("llama")["model_type"] == "llama"
    assert config("llama", **{experts: 0, window: 0}) == config("llama")
    assert config("llama", **{window: 4})["model_type"] == "mistral"
    assert config("llama", **{experts: 4, "expert_used_count": 2})["model_type"] == "mixtral"
    for gemma in (config("gemma3"), config("gemma3", **{window: 0})):
        assert gemma["layer_types"] == ["full_attention"] * 8
        assert gemma["sliding_window"] is gemma["final_logit_softcapping"] is None
    windowed = config("gemma3", **{window: 4})
    assert windowed["layer_types"].index("full_attention") == 5 and windowed["sliding_window"] == 4


def test_a_scaling_of_positions_is_that_of_a_config():
    def scaling(**values):
        named = {f"rope.{name}": value for name, value in values.items()}
        return rope_scaling(keys(**named), None, head_dim=8, theta=1e4)

    assert scaling() is None
    assert scaling(**{"scaling.factor": 1.0}) is scaling(**{"scaling.factor": 0.0}) is None
    assert scaling(scale_linear=2.0) == {"rope_type": "linear", "factor": 2.0}
    yarn = {"scaling.type": "yarn", "scaling.factor": 4.0}
    assert scaling(**yarn) == {"rope_type": "yarn", "factor": 4.0}
    usual = 0.1 * np.log(4.0) + 1  # which llama.cpp takes without being told
    assert scaling(**yarn, **{"scaling.attn_factor": float(usual)}) == scaling(**yarn)
    assert scaling(**yarn | {"scaling.factor": 0.0})["factor"] == 0.0  # a config refuses it
    for wrong in ({"scaling.attn_factor": 1.5}, {"scaling.type": "longest"}):
        with pytest.raises(UnsupportedModelError):
            scaling(**yarn | wrong)
    more = {"original_context_length": 32, "yarn_beta_fast": 16.0, "yarn_attn_factor": 1.25}
    assert scaling(**yarn, **{f"scaling.{name}": value for name, value in more.items()}) == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 16.0, "attention_factor": 1.25,
    }  # fmt: skip
