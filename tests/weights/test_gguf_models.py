"""A model loaded from GGUF gives the logits of the same model loaded from safetensors."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.parity.ours import load, run
from tests.weights.gguf_export import export, write_checkpoint

from ridgeline.core.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError
from ridgeline.engine.loading import LoadedModel
from ridgeline.quant.gguf_formats import GGUF_FORMATS
from ridgeline.weights import expanded_weights
from ridgeline.weights.gguf import GGUFCheckpoint, GGUFFile, describe_gguf
from ridgeline.weights.gguf.names import tiled_rows

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "rope_theta": 5000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9}
PHI3 = {"original_max_position_embeddings": 16, "tie_word_embeddings": False}
LONGROPE = {
    "type": "longrope",
    "long_factor": [1.0, 1.5, 2.5, 3.25, 4.0, 5.5, 6.0, 7.0],
    "short_factor": [1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 2.0],
}
GPT2 = {
    "vocab_size": 101,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-3,
}
CASES = {
    "llama": ("llama", SIZES | {"model_type": "llama"}),
    "llama-tied-wide-heads": (
        "llama", SIZES | {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 24},
    ),
    "llama-biases": ("llama", SIZES | {"model_type": "llama", "attention_bias": True}),
    "llama3-scaling": ("llama", SIZES | {"model_type": "llama", "rope_scaling": LLAMA3}),
    "llama3-other-band": (
        "llama",
        SIZES
        | {
            "model_type": "llama",
            "head_dim": 64,
            "rope_scaling": LLAMA3 | {"low_freq_factor": 0.5, "high_freq_factor": 6.0},
        },
    ),
    "linear": (
        "llama",
        SIZES | {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "mistral-window": ("llama", SIZES | {"model_type": "mistral", "sliding_window": 9}),
    "mixtral": (
        "llama",
        SIZES | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2": ("qwen2", SIZES | {"model_type": "qwen2"}),
    "qwen2-yarn": (
        "qwen2",
        SIZES
        | {
            "model_type": "qwen2",
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3": ("qwen3", SIZES | {"model_type": "qwen3", "head_dim": 32}),
    "gemma2": ("gemma2", SIZES | GEMMA | {
        "model_type": "gemma2", "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
    }),
    "gemma3": ("gemma3", SIZES | GEMMA | {"model_type": "gemma3_text", "num_hidden_layers": 7}),
    "gemma3-linear": ("gemma3", SIZES | GEMMA | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }),
    "phi3": ("phi3", SIZES | PHI3 | {"model_type": "phi3", "sliding_window": 9}),
    "phi3-longrope": ("phi3", SIZES | PHI3 | {"model_type": "phi3", "rope_scaling": LONGROPE}),
    "gpt2": ("gpt2", GPT2 | {"model_type": "gpt2"}),
}  # fmt: skip
TOKENS = [(7 * i * i + 3 * i + 1) % 101 for i in range(40)]


def logits(model: LoadedModel) -> np.ndarray:
    return run(model.model, TOKENS, prompt_tokens=36)


def assert_equal_weights(found: LoadedModel, expected: LoadedModel) -> None:
    values = expanded_weights(found.model.weights, found.model.dtype)
    wanted = expanded_weights(expected.model.weights, expected.model.dtype)
    assert values.keys() == wanted.keys()
    for name, value in values.items():
        assert np.array_equal(value, wanted[name]), name


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_safetensors(tmp_path: Path, name: str) -> None:
    architecture, config = CASES[name]
    write_checkpoint(config, tmp_path / "model")
    expected = load(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "model.gguf", architecture)
    found = load(tmp_path / "model.gguf")
    assert_equal_weights(found, expected)
    want = logits(expected)
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(logits(found), want, atol=2e-5, rtol=0)


def test_rope_keys_mean_what_they_do_to_llama_cpp(tmp_path: Path) -> None:
    """A factor without a type is linear; Phi-3's converter writes down its factor of attention."""
    for architecture, case, more, scaling in (
        ("llama", "llama", {"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ("llama", "llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        (
            "phi3",
            "phi3-longrope",
            {"rope.scaling.attn_factor": 1.5},
            LONGROPE | {"attention_factor": 1.5},
        ),
    ):
        config = dict(CASES[case][1])
        write_checkpoint(config, tmp_path / "model")
        export(tmp_path / "model", tmp_path / "x.gguf", architecture, more=more)
        write_checkpoint(config | {"rope_scaling": scaling}, tmp_path / "model")
        found, expected = load(tmp_path / "x.gguf"), load(tmp_path / "model")
        np.testing.assert_allclose(logits(found), logits(expected), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "more", [{"attention.causal": False}, {"rope.scaling.attn_factor": 1.5}], ids=str
)
def test_keys_that_would_change_the_output_are_refused(
    tmp_path: Path, more: dict[str, object]
) -> None:
    write_checkpoint(CASES["llama"][1], tmp_path / "model")
    export(tmp_path / "model", tmp_path / "x.gguf", "llama", more=more)
    with pytest.raises(UnsupportedModelError, match=next(iter(more))):
        load(tmp_path / "x.gguf")


@pytest.mark.parametrize("length", [None, 64])
def test_queries_that_grow_by_another_length_than_yarn_s_are_refused(
    tmp_path: Path, length: int | None
) -> None:
    """And not left as they are, where there is no YaRN."""
    more = {"attention.temperature_scale": 0.1}
    if length is not None:
        more |= {
            "attention.temperature_length": length, "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
        }  # fmt: skip
    write_checkpoint(CASES["llama"][1], tmp_path / "model")
    export(tmp_path / "model", tmp_path / "x.gguf", "mistral3", more=more)
    with pytest.raises(UnsupportedModelError, match=r"temperature_scale\) by a length of"):
        load(tmp_path / "x.gguf")


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_formats_hold_the_same_values(tmp_path: Path, kind: str) -> None:
    write_checkpoint(CASES["llama"][1], tmp_path / "model")
    matrices = gguf.GGMLQuantizationType[kind]
    export(tmp_path / "model", tmp_path / "x.gguf", "llama", matrices=matrices)
    found, expected = load(tmp_path / "x.gguf"), load(tmp_path / "model")
    assert_equal_weights(found, expected)
    with GGUFCheckpoint(tmp_path / "x.gguf") as checkpoint:
        dtype = describe_gguf(checkpoint).dtype
    assert dtype == {"F16": "float16", "BF16": "bfloat16"}[kind]


def test_value_heads_go_round_the_key_heads_in_files() -> None:
    """Of 2 key heads with 3 values each a file has the first value of both, and so on."""
    assert tiled_rows(2, 6, 1).tolist() == [0, 3, 1, 4, 2, 5]
    assert tiled_rows(2, 4, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_blocks_are_those_of_the_weights(tmp_path: Path) -> None:
    write_checkpoint(CASES["llama"][1], tmp_path / "model")
    kind = gguf.GGMLQuantizationType.Q8_0
    export(tmp_path / "model", tmp_path / "x.gguf", "llama", matrices=kind)
    with GGUFCheckpoint(tmp_path / "x.gguf") as checkpoint:
        assert describe_gguf(checkpoint).dtype == "bfloat16"
        for name in checkpoint.names():
            if not name.endswith("norm.weight"):
                whole = checkpoint.tensor(name)
                assert np.array_equal(
                    checkpoint.blocks(name).dequantize(whole.dtype.name), whole
                ), name
        assert checkpoint.blocks("blk.0.attn_q.weight").format.name == "Q8_0"


def test_a_split_model_is_one(tmp_path: Path) -> None:
    write_checkpoint(CASES["llama"][1], tmp_path / "model")
    export(tmp_path / "model", tmp_path / "x.gguf", "llama", split_max_tensors=7)
    parts = sorted(tmp_path.glob("x-*.gguf"))
    assert len(parts) == 3
    expected = load(tmp_path / "model")
    for part in parts[:1] + parts[-1:]:
        if part == parts[0]:
            assert_equal_weights(load(part), expected)
        with GGUFCheckpoint(part) as checkpoint:
            assert len(checkpoint.names()) == 21
    parts[1].unlink()
    with pytest.raises(ModelNotFoundError, match="1 of the 3 parts"):
        GGUFCheckpoint(parts[0])
    parts[2].rename(parts[1])
    parts[1].with_name(parts[2].name).write_bytes(parts[0].read_bytes())
    with pytest.raises(CorruptFileError, match="is not part 2 of 3"):
        GGUFCheckpoint(parts[0])


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    write_checkpoint(CASES["llama"][1], tmp_path / "model")
    path = tmp_path / "x.gguf"
    export(tmp_path / "model", path, "llama")
    data = path.read_bytes()
    path.write_bytes(
        data.replace(
            b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00lxmxm", 1
        )
    )
    with pytest.raises(UnsupportedModelError, match="architecture 'lxmxm'; supported are llama"):
        load(path)
    iq1 = next(number for number, fmt in GGUF_FORMATS.items() if fmt.name == "IQ1_S")
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType(iq1)
    writer.add_tensor("a.weight", np.zeros((2, 50), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as file:
        assert file.tensors["a.weight"].shape == (2, 256)
        with pytest.raises(UnsupportedModelError, match=r"format IQ1_S.*take a file"):
            file.entry("a.weight")
