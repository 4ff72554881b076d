"""Weights go to the executor one after the other: when one is read, those before it are gone."""

import weakref
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.tiny import tiny_model
from tests.weights.gguf_export import export, write_checkpoint
from tests.weights.test_gguf_models import CASES

from ridgeline.core.config import EngineConfig
from ridgeline.core.formats import on_load_format
from ridgeline.engine.loading import load_model
from ridgeline.executors.cpu.weights import pack_weights
from ridgeline.kernels.cpu.pool import shared_pool
from ridgeline.weights import CheckpointWeights, DummyWeights, dummy_weights, expanded_weights
from ridgeline.weights.gguf import GGUFCheckpoint, GGUFFile
from ridgeline.weights.safetensors_file import SafetensorsFile


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """Every tensor and array that weights are read into; fails if two are there at once."""
    found: list[weakref.ref] = []

    def note(memory: object) -> None:
        if isinstance(memory, np.ndarray) and memory.base is not None:
            memory = memory.base
        assert [ref for ref in found if ref() is not None and ref() is not memory] == []
        found.append(weakref.ref(memory))

    def reading(original):
        def read_into(self, name, out, *rest, **options):
            note(out)
            original(self, name, out, *rest, **options)

        return read_into

    for owner in (SafetensorsFile, GGUFCheckpoint):
        monkeypatch.setattr(owner, "read_into", reading(owner.read_into))
    monkeypatch.setattr(GGUFFile, "blocks", reading_blocks(note, GGUFFile.blocks))
    return found


def reading_blocks(note, original):
    def blocks(self, name, index=None):
        found = original(self, name, index)
        note(found.data)
        return found

    return blocks


def model_of(path: Path):
    return load_model(EngineConfig(model=str(path), dtype="bfloat16")).model


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_packing_holds_one_weight_of_a_folder(tmp_path: Path, reads, quantization) -> None:
    write_checkpoint(CASES["llama"][1], tmp_path / "model")
    form = on_load_format(quantization)
    model = replace(model_of(tmp_path / "model"), quantization=form)
    packed = pack_weights(shared_pool(), model)
    assert len(reads) == len(packed.matrices) + len(packed.vectors) == 21


def test_packing_holds_one_weight_of_a_gguf_file(tmp_path: Path, reads) -> None:
    write_checkpoint(CASES["llama"][1], tmp_path / "model")
    kind = gguf.GGMLQuantizationType.Q4_0
    export(tmp_path / "model", tmp_path / "x.gguf", "llama", matrices=kind)
    packed = pack_weights(shared_pool(), model_of(tmp_path / "x.gguf"))
    assert len(reads) == len(packed.matrices) + len(packed.vectors) == 21


def test_packing_holds_one_expert(tmp_path: Path, reads) -> None:
    """Of experts that are tensors of their own, and of a GGUF file's stacks."""
    config = CASES["mixtral"][1]
    num_stacked = 3 * config["num_local_experts"] * config["num_hidden_layers"]
    write_checkpoint(config, tmp_path / "model")
    kind = gguf.GGMLQuantizationType.Q4_0
    export(tmp_path / "model", tmp_path / "x.gguf", "llama", matrices=kind)
    for path in (tmp_path / "model", tmp_path / "x.gguf"):
        reads.clear()
        packed = pack_weights(shared_pool(), model_of(path))
        stacks = sum(len(matrices) > 1 for matrices in packed.matrices.values())
        assert len(packed.matrices) + len(packed.vectors) == len(reads) - num_stacked + stacks
        assert stacks == 3 * config["num_hidden_layers"]


def test_a_source_can_be_read_again(tmp_path: Path) -> None:
    write_checkpoint(CASES["llama"][1], tmp_path / "model")
    source = model_of(tmp_path / "model").weights
    first, second = (expanded_weights(source, "bfloat16") for _ in range(2))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_random_weights_are_a_source() -> None:
    ops = tiny_model().ops
    streamed = dict(DummyWeights(ops=ops, dtype="float32", seed=3).items())
    wanted = dummy_weights(ops, dtype="float32", seed=3)
    assert streamed.keys() == wanted.keys()
    assert all(np.array_equal(streamed[name], wanted[name]) for name in wanted)


def test_the_digest_names_bytes_and_meaning(tmp_path: Path) -> None:
    write_checkpoint(CASES["llama"][1], tmp_path / "one")
    write_checkpoint(CASES["llama"][1], tmp_path / "same")
    write_checkpoint(CASES["llama"][1], tmp_path / "other", seed=1)
    found = []
    for name in ("one", "same", "other"):
        source = model_of(tmp_path / name).weights
        assert isinstance(source, CheckpointWeights)
        found.append(source.digest())
    assert found[0] == found[1] != found[2]
    wider = load_model(EngineConfig(model=str(tmp_path / "one"), dtype="float32")).model.weights
    assert isinstance(wider, CheckpointWeights)
    assert wider.digest() != found[0]


def test_the_digest_says_how_far_it_is(tmp_path: Path) -> None:
    write_checkpoint(CASES["llama"][1], tmp_path / "model")
    source, calls = model_of(tmp_path / "model").weights, []
    assert isinstance(source, CheckpointWeights)
    told = replace(source, progress=lambda *call: calls.append(call))
    memory = tmp_path / "known.json"
    assert told.digest(memory=memory) == source.digest()
    files = {file.name: file.stat().st_size for file in (tmp_path / "model").iterdir()}
    assert [label for _, _, label in calls] == [f"checking {name}" for name in sorted(files)]
    assert calls[-1][:2] == (sum(files.values()), sum(files.values()))
    calls.clear()
    told.digest(memory=memory)
    assert calls == []


def test_all_parts_of_a_gguf_model_are_digested(tmp_path: Path) -> None:
    write_checkpoint(CASES["llama"][1], tmp_path / "model")
    export(tmp_path / "model", tmp_path / "x.gguf", "llama", split_max_tensors=7)
    parts = sorted(tmp_path.glob("x-*.gguf"))
    source = model_of(parts[0]).weights
    assert isinstance(source, CheckpointWeights)
    assert source.num_bytes() == sum(part.stat().st_size for part in parts)
    before = source.digest()
    data = bytearray(parts[2].read_bytes())
    data[-1] ^= 1
    parts[2].write_bytes(data)
    assert source.digest() != before
