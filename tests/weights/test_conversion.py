"""Models from safetensors to GGUF and back: tensors, keys and logits stay what they were."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.parity.ours import load
from tests.tiny import SINKS
from tests.weights.gguf_export import export, write_checkpoint
from tests.weights.test_gguf_models import CASES, SIZES, assert_equal_weights, logits

from ridgeline.core.errors import (
    CorruptFileError,
    DiskError,
    InvalidRequestError,
    UnsupportedModelError,
)
from ridgeline.models import describe
from ridgeline.weights.conversion import convert_to_gguf, convert_to_safetensors
from ridgeline.weights.gguf import GGUFCheckpoint
from ridgeline.weights.gguf.imatrix import Importance, read_imatrix
from ridgeline.weights.gguf.mixes import FILE_TYPES, fitting_format, mixed_format

LLAMA = CASES["llama"][1]


def to_gguf(folder: Path, out: Path, file_type: str = "f32", **more) -> list[Path]:
    return convert_to_gguf(folder, out, file_type, name="test", **more)


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("name", CASES)
def test_the_file_is_what_llama_cpps_converter_makes(tmp_path: Path, name: str) -> None:
    """Tensors by the ``gguf`` package's names; the reader's logits are those of the folder."""
    architecture, config = CASES[name]
    write_checkpoint(config, tmp_path / "model")
    to_gguf(tmp_path / "model", tmp_path / "ours.gguf")
    export(tmp_path / "model", tmp_path / "theirs.gguf", architecture)
    ours, theirs = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / f"{which}.gguf").tensors}
        for which in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    for tensor, found in ours.items():
        assert found.shape.tolist() == theirs[tensor].shape.tolist(), tensor
        np.testing.assert_allclose(found.data, theirs[tensor].data, rtol=1e-6, err_msg=tensor)
    found, expected = load(tmp_path / "ours.gguf"), load(tmp_path / "model")
    assert_equal_weights(found, expected)
    np.testing.assert_allclose(logits(found), logits(expected), atol=2e-5, rtol=0)
    assert left_behind(tmp_path) == []


def test_parts_go_back_to_the_tensors_that_they_lay_in(tmp_path: Path) -> None:
    """Experts to tensors of their own, rows to what is fused, and what is transposed stays so."""
    for name in ("mixtral", "phi3", "gpt2", "gemma3"):
        write_checkpoint(CASES[name][1], tmp_path / name)
        convert_to_safetensors(tmp_path / name, tmp_path / f"{name}-again", "float32")
        before, after = (
            load_file(folder / "model.safetensors")
            for folder in (tmp_path / name, tmp_path / f"{name}-again")
        )
        assert after.keys() == before.keys()
        assert all(torch.equal(after[tensor], before[tensor]) for tensor in before), name


def test_a_pattern_of_windows_is_written_as_it_is(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = CASES["gemma3"][1] | {"num_hidden_layers": 3, "layer_types": kinds}
    write_checkpoint(config, tmp_path / "model")
    to_gguf(tmp_path / "model", tmp_path / "x.gguf")
    field = gguf.GGUFReader(tmp_path / "x.gguf").fields["gemma3.attention.sliding_window_pattern"]
    assert field.contents() == [False, True, False]


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    write_checkpoint(LLAMA, tmp_path / "model")
    with pytest.raises(DiskError, match="name too long"):
        convert_to_safetensors(tmp_path / "model", tmp_path / ("x" * 300))


@pytest.mark.parametrize("name", CASES)
def test_back_to_safetensors(tmp_path: Path, name: str) -> None:
    _, config = CASES[name]
    write_checkpoint(config, tmp_path / "model")
    to_gguf(tmp_path / "model", tmp_path / "x.gguf")
    convert_to_safetensors(tmp_path / "x.gguf", tmp_path / "back", "float32")
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert after.keys() == before.keys()
    for tensor, values in before.items():
        assert torch.equal(after[tensor], values.float()), tensor
    found, expected = load(tmp_path / "back"), load(tmp_path / "model")
    np.testing.assert_allclose(logits(found), logits(expected), atol=2e-5, rtol=0)


def test_another_dtype_leaves_all_else_as_it_was(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_checkpoint(LLAMA | {"torch_dtype": "float32"}, model)
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    convert_to_safetensors(model, tmp_path / "half", "bfloat16")
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "half" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config == LLAMA | {"torch_dtype": "bfloat16"}
    copied = tmp_path / "half" / "generation_config.json"
    assert copied.read_text() == '{"temperature": 0.5}'


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_every_type_is_read_again(tmp_path: Path, file_type: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    write_checkpoint(LLAMA | sizes, tmp_path / "model")
    to_gguf(tmp_path / "model", tmp_path / "x.gguf", file_type)
    usual = FILE_TYPES[file_type].format
    with GGUFCheckpoint(tmp_path / "x.gguf") as file:
        formats = {name: file.format_name(name) for name in file.names()}
        original = load_file(tmp_path / "model" / "model.safetensors")
        found = file.tensor("blk.1.ffn_gate.weight")
        wanted = original["model.layers.1.mlp.gate_proj.weight"]
        wanted = wanted.float().numpy()
        assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < {"2": 0.4, "3": 0.2}.get(
            usual[1:2], 0.12
        )
    assert formats["blk.1.ffn_gate.weight"] == usual
    assert formats["output_norm.weight"] == "F32"
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    field = reader.get_field("general.file_type")
    assert field is not None
    assert field.contents() == FILE_TYPES[file_type].number
    for tensor in reader.tensors:
        assert tensor.tensor_type.name == formats[tensor.name]


def test_mixes_are_llama_cpps() -> None:
    """Facts of Llama 3.1 8B and Mixtral files as they are on the hub."""
    llama = describe(LLAMA | {"num_hidden_layers": 32, "num_attention_heads": 8}).spec
    tied = describe(LLAMA | {"tie_word_embeddings": True}).spec
    mixtral = describe(CASES["mixtral"][1] | {"num_local_experts": 8}).spec
    wide, narrow = (4096, 4096), (4096, 384)
    for name, shape, file_type, spec, expected in (
        ("blk.0.attn_v.weight", wide, "q4_k_m", llama, "Q6_K"),
        ("blk.5.attn_v.weight", wide, "q4_k_m", llama, "Q4_K"),
        ("blk.6.ffn_down.weight", wide, "q4_k_m", llama, "Q6_K"),
        ("blk.31.ffn_down.weight", wide, "q5_k_m", llama, "Q6_K"),
        ("blk.1.attn_v.weight", wide, "q3_k_m", llama, "Q5_K"),
        ("blk.2.attn_output.weight", wide, "q3_k_m", llama, "Q4_K"),
        ("blk.2.attn_v.weight", wide, "q2_k", llama, "Q4_K"),
        ("blk.2.ffn_up.weight", wide, "q2_k", llama, "Q2_K"),
        ("output.weight", wide, "q4_0", llama, "Q6_K"),
        ("token_embd.weight", wide, "q4_k_m", llama, "Q4_K"),
        ("token_embd.weight", wide, "q4_k_m", tied, "Q6_K"),
        ("blk.0.attn_q.weight", narrow, "q4_k_m", llama, "Q5_0"),
        ("blk.0.attn_v.weight", narrow, "q4_k_m", llama, "Q8_0"),
        ("blk.0.attn_q.weight", narrow, "q3_k_m", llama, "Q4_0"),
        ("blk.0.attn_q.weight", (64, 36), "q4_k_m", llama, "F16"),
        ("blk.0.attn_norm.weight", (4096,), "q4_k_m", llama, "F32"),
        ("blk.0.attn_k.weight", wide, "q4_k_m", mixtral, "Q8_0"),
        ("blk.0.attn_output.weight", wide, "q4_k_m", mixtral, "Q5_K"),
        ("blk.0.ffn_gate_inp.weight", (8, 4096), "q4_k_m", mixtral, "F32"),
    ):
        mixed = mixed_format(name, shape, file_type, spec)
        assert fitting_format(mixed, shape[-1]) == expected, (name, file_type)
    assert mixed_format("blk.3.ffn_down.weight", wide, "q4_0", llama) == "Q4_0"
    found = mixed_format("blk.3.ffn_down.weight", wide, "q4_0", llama, with_importance=True)
    assert found == "Q4_1"


def test_a_large_file_is_split(tmp_path: Path) -> None:
    write_checkpoint(LLAMA, tmp_path / "model")
    paths = to_gguf(tmp_path / "model", tmp_path / "x.gguf", split_max_bytes=100_000)
    assert len(paths) > 2
    assert paths[0].name == f"x-00001-of-{len(paths):05}.gguf"
    assert all(path.stat().st_size < 110_000 for path in paths)
    assert_equal_weights(load(paths[0]), load(tmp_path / "model"))
    with pytest.raises(InvalidRequestError, match=r"x-00001-of-0000.\.gguf exists already"):
        to_gguf(tmp_path / "model", tmp_path / "x.gguf", split_max_bytes=100_000)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "scaled by DynamicScaling"),
        ({"model_type": "olmo2"}, "type 'olmo2' are not written as GGUF"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
             "max_window_layers": 1},
            r"GGUF cannot say all of this qwen2 model: layers\[1\]\.attention\.window is 8",
        ),
        ({"model_type": "qwen3", "attention_bias": True}, "qwen3 model.*bias"),
    ],
)  # fmt: skip
def test_what_gguf_cannot_say_is_refused(tmp_path: Path, config: dict, text: str) -> None:
    write_checkpoint(SIZES | {"model_type": "llama"} | config, tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=text):
        to_gguf(tmp_path / "model", tmp_path / "x.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_nothing_is_written_over_and_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_checkpoint(LLAMA, model)
    (tmp_path / "x.gguf").write_text("mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidRequestError, match="exists already"):
        to_gguf(model, tmp_path / "x.gguf")
    with pytest.raises(InvalidRequestError, match="exists already"):
        convert_to_safetensors(model, tmp_path / "folder")
    with pytest.raises(InvalidRequestError, match="no folder"):
        to_gguf(model, tmp_path / "nowhere" / "x.gguf")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"'layers\.1\.up' has values that are not fin"):
        to_gguf(model, tmp_path / "y.gguf", "q8_0")
    with pytest.raises(UnsupportedModelError, match=r"'layers\.1\.up' has values that are not fin"):
        convert_to_safetensors(model, tmp_path / "y", "bfloat16")
    assert (tmp_path / "x.gguf").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "model", "x.gguf"]


def importance(columns: dict[str, int], experts: int = 1) -> Importance:
    rng = np.random.default_rng(0)
    return Importance(
        sums={
            name: rng.gamma(0.5, size=(experts if "exps" in name else 1, width)).astype("f4")
            for name, width in columns.items()
        },
        counts={
            name: np.arange(1, 1 + (experts if "exps" in name else 1), dtype="f4")
            for name in columns
        },
        chunks=3,
        chunk_tokens=7,
        datasets=("a.txt",),
        source="imatrix.gguf",
    )


def columns_of(path: Path) -> dict[str, int]:
    with GGUFCheckpoint(path) as file:
        return {n: file.shape(n)[-1] for n in file.names() if len(file.shape(n)) > 1}


def test_importance_matrices_are_those_of_llama_cpp(tmp_path: Path) -> None:
    write_checkpoint(CASES["mixtral"][1], tmp_path / "model")
    to_gguf(tmp_path / "model", tmp_path / "f32.gguf")
    columns = columns_of(tmp_path / "f32.gguf")
    ours = importance(columns, experts=4)
    ours.save(tmp_path / "imatrix.gguf")
    theirs = gguf.GGUFReader(tmp_path / "imatrix.gguf")
    named = {tensor.name: tensor for tensor in theirs.tensors}
    assert len(named) == 2 * len(columns)
    experts = named["blk.0.ffn_up_exps.weight.in_sum2"]
    assert experts.shape.tolist() == [64, 4]
    assert np.array_equal(experts.data, ours.sums["blk.0.ffn_up_exps.weight"])
    for key, value in (("general.type", "imatrix"), ("imatrix.chunk_count", 3),
                       ("imatrix.chunk_size", 7), ("imatrix.datasets", ["a.txt"])):  # fmt: skip
        field = theirs.get_field(key)
        assert field is not None
        assert field.contents() == value
    again = read_imatrix(tmp_path / "imatrix.gguf")
    for name, width in columns.items():
        for expert in range(len(ours.sums[name])):
            wanted = ours.sums[name][expert] / (expert + 1)
            assert np.array_equal(again.of(name, width, expert), wanted)
    assert again.of("nothing", 3) is None
    assert (again.chunks, again.datasets) == (3, ("a.txt",))


def test_the_old_format_is_read(tmp_path: Path) -> None:
    """``save_imatrix_legacy`` of llama.cpp: name, calls, means times calls; calls, data set."""
    path, values = tmp_path / "imatrix.dat", np.arange(8, dtype="<f4")

    def read(*parts: int | bytes, length: int | None = None) -> Importance:
        data = (part if isinstance(part, bytes) else part.to_bytes(4, "little") for part in parts)
        path.write_bytes(b"".join(data)[:length])
        return read_imatrix(path)

    entry = (1, 5, b"a.exp", 2, 8, values.tobytes())
    for end, told in (((), (0, ())), ((9,), (9, ())), ((9, 4, b"text"), (9, ("text",)))):
        found = read(*entry, *end)  # older files have less
        assert np.array_equal(found.of("a.exp", 4, 1), values[4:] / 2)
        assert (found.chunks, found.datasets) == told
    assert read(1, 1, b"a", 2, 1, values[6:7].tobytes()).of("a", 1) == [3]
    with pytest.raises(CorruptFileError):
        read(1, 1, b"a", 2, 0)
    for length in range(0, 53, 3):
        with pytest.raises(CorruptFileError):
            read(*entry, length=length)


def test_rows_that_lie_by_turns_are_not_written_as_safetensors(tmp_path: Path) -> None:
    write_checkpoint(SINKS, tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="type gpt_oss are not written as safetensors"):
        convert_to_safetensors(tmp_path / "model", tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_importance_is_used_and_that_of_another_model_refused(tmp_path: Path) -> None:
    write_checkpoint(LLAMA, tmp_path / "model")
    to_gguf(tmp_path / "model", tmp_path / "plain.gguf", "q4_k_m")
    columns = columns_of(tmp_path / "plain.gguf")
    to_gguf(tmp_path / "model", tmp_path / "x.gguf", "q4_k_m", importance=importance(columns))
    first, second = (gguf.GGUFReader(tmp_path / name) for name in ("plain.gguf", "x.gguf"))
    same = {
        a.name: np.array_equal(a.data, b.data)
        for a, b in zip(first.tensors, second.tensors, strict=True)
    }
    assert not same["blk.0.ffn_up.weight"]
    assert same["blk.0.attn_norm.weight"]
    field = second.get_field("quantize.imatrix.entries_count")
    assert field is not None
    assert field.contents() == len(columns)
    del columns["blk.1.ffn_up.weight"]
    for wrong, text in (
        (columns, r"has nothing about 'blk\.1\.ffn_up\.weight'"),
        (columns | {"blk.1.ffn_up.weight": 32}, "another number of columns"),
    ):
        with pytest.raises(InvalidRequestError, match=text):
            to_gguf(tmp_path / "model", tmp_path / "y.gguf", "q4_k_m", importance=importance(wrong))


def test_what_is_quantized_already_is_taken_only_on_demand(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_checkpoint(LLAMA, model)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequestError, match=r"quantized already.*--requantize"):
        to_gguf(model, tmp_path / "x.gguf")
    to_gguf(model, tmp_path / "x.gguf", requantize=True)
    assert_equal_weights(load(tmp_path / "x.gguf"), load(model))
