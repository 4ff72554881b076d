"""Packing a model one matrix at a time gives what whole stacks give, and nothing else."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import CONFIG, EXPERTS, LATENT, SINKS
from tests.weights.gguf_export import export, write_checkpoint
from tests.weights.test_gguf_models import CASES

from ridgeline.core.config import EngineConfig
from ridgeline.core.formats import on_load_format
from ridgeline.engine.loading import load_model
from ridgeline.executors.cpu import codes
from ridgeline.executors.cpu.roles import packed_bytes
from ridgeline.executors.cpu.weights import PackedWeights, pack_weights
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.cpu.library import native_kernels_run
from ridgeline.kernels.cpu.pool import shared_pool
from ridgeline.models import describe, lower
from ridgeline.weights import DummyWeights, Weight, weight_shapes
from ridgeline.weights.gguf import GGUFFile

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="the native kernels are not built")

QUANTIZED = Path(__file__).parents[1] / "data" / "quantized"
MIXTRAL = CASES["mixtral"][1]
GATES = "model.layers.{}.block_sparse_moe.experts.{}.w1."


def packed(model: ExecutorModel, **weights: Weight) -> PackedWeights:
    if weights:
        model = replace(model, weights=weights)
    return pack_weights(shared_pool(), model)


def assert_same(found: PackedWeights, wanted: PackedWeights) -> None:
    assert found.matrices.keys() == wanted.matrices.keys()
    for name, matrices in wanted.matrices.items():
        for one, other in zip(found.matrices[name], matrices, strict=True):
            assert np.array_equal(one.data, other.data), name
            for field in ("format", "rows", "columns", "group", "has_min", "multiplier"):
                assert getattr(one.struct, field) == getattr(other.struct, field), name
    assert found.vectors.keys() == wanted.vectors.keys()
    for name, vector in wanted.vectors.items():
        assert np.array_equal(found.vectors[name], vector), name


def load(path: Path, quantization: str | None = None) -> ExecutorModel:
    return load_model(EngineConfig(model=str(path), quantization=quantization)).model


def write_gptq(folder: Path, shuffled: set[int]) -> None:
    """A mixtral whose experts' first matrices are random codes, some experts' in act-order."""
    write_checkpoint(MIXTRAL | {"quantization_config": GPTQ}, folder)
    tensors = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(0)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=random).to(torch.int32)

    for layer in range(MIXTRAL["num_hidden_layers"]):
        for expert in range(MIXTRAL["num_local_experts"]):
            prefix = GATES.format(layer, expert)
            outputs, inputs = tensors.pop(f"{prefix}weight").shape
            order = torch.arange(inputs, dtype=torch.int32) // 32
            tensors |= {
                f"{prefix}qweight": words(inputs // 8, outputs),
                f"{prefix}qzeros": words(inputs // 32, outputs // 8),
                f"{prefix}scales": torch.rand(inputs // 32, outputs, generator=random).half(),
                f"{prefix}g_idx": order.flip(0).contiguous() if expert in shuffled else order,
            }
    save_file(tensors, folder / "model.safetensors")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}


def write_fused(folder: Path) -> None:
    """Experts as gpt-oss stores them: inputs first, gate and up in turn."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SINKS))
    definition = describe(SINKS)
    tensors: dict[str, torch.Tensor] = {}
    random = torch.Generator().manual_seed(0)
    for name, extents in weight_shapes(lower(definition.spec)).items():
        source, shape = definition.sources[name], list(extents)
        shape[-2:] = shape[-2:][::-1] if source.transpose else shape[-2:]
        shape[-1] *= 1 if source.every_other is None else 2
        tensors[source.name] = torch.randn(shape, generator=random).bfloat16()
    save_file(tensors, folder / "model.safetensors")


WRITERS: dict[str, Callable[[Path], object]] = {
    "experts": lambda folder: write_checkpoint(MIXTRAL, folder),
    "fused": write_fused,
    "gptq": lambda folder: write_gptq(folder, set()),
    "gptq act-order": lambda folder: write_gptq(folder, {0, 1, 2, 3}),
    "gptq first in act-order": lambda folder: write_gptq(folder, {0}),
    "gptq last in act-order": lambda folder: write_gptq(folder, {3}),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_stacks_of_a_folder(tmp_path: Path, kind: str, quantization: str | None) -> None:
    if quantization and kind.startswith("gptq"):
        pytest.skip("is quantized already")
    WRITERS[kind](tmp_path / "model")
    model = load(tmp_path / "model", quantization)
    assert_same(packed(model), packed(model, **dict(model.weights.items())))


def test_stacks_of_mxfp4() -> None:
    model = load(QUANTIZED / "mxfp4-gpt-oss")
    assert_same(packed(model), packed(model, **dict(model.weights.items())))


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q8_0"])
def test_stacks_of_a_gguf_file(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path, kind)
    model = load(path)
    assert_same(packed(model), packed(model, **dict(model.weights.items())))


def write_gguf(folder: Path, kind: str) -> Path:
    write_checkpoint(MIXTRAL, folder / "model")
    path = folder / "model.gguf"
    export(folder / "model", path, "llama", matrices=gguf.GGMLQuantizationType[kind])
    return path


@pytest.mark.parametrize("expert", [0, 2, 3])
def test_one_matrix_without_a_layout_expands_its_stack(tmp_path: Path, expert: int) -> None:
    """Which is known only when it comes: its scales are not finite."""
    path = write_gguf(tmp_path, "Q4_0")
    with GGUFFile(path) as file:
        entry = file.tensors["blk.1.ffn_up_exps.weight"]
    size = (entry.stop - entry.start) // MIXTRAL["num_local_experts"]
    with path.open("r+b") as written:
        written.seek(entry.start + expert * size)
        written.write(np.array([np.inf], "<f2").tobytes())
    model = load(path)
    found, stacks = packed(model), dict(model.weights.items())
    name = "layers.1.experts.up"
    assert_same(found, packed(model, **stacks | {name: stacks[name].dequantize(model.dtype)}))
    assert name not in found.formats()
    assert "layers.1.experts.gate" in found.formats()


@pytest.mark.parametrize("name", ["ct-int4-group-asym", "ct-fp8-block", "gptq-int3-v2-act-order"])
def test_matrices_are_packed_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(QUANTIZED / name)
    wanted = packed(model)
    monkeypatch.setattr(codes, "_CHUNK_ELEMENTS", 1)  # a tile at a time
    assert_same(packed(model), wanted)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_blocks_are_packed_in_chunks(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(write_gguf(tmp_path, kind))
    wanted = packed(model)
    monkeypatch.setattr(codes, "_CHUNK_ELEMENTS", 1)
    assert_same(packed(model), wanted)


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int4-g128", "int3", "int2"])
@pytest.mark.parametrize("config", [CONFIG, EXPERTS, LATENT, SINKS])
def test_bytes_are_known_before(config: dict, quantization: str | None) -> None:
    spec = describe(config).spec
    ops, dtype, form = lower(spec), "bfloat16", on_load_format(quantization)
    weights = DummyWeights(ops=ops, dtype=dtype, seed=0)
    model = ExecutorModel(spec=spec, ops=ops, weights=weights, dtype=dtype, quantization=form)
    assert packed_bytes(shared_pool(), ops, dtype, form) == packed(model).num_bytes
