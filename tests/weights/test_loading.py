"""Whole checkpoints: single and sharded, converted, and every kind of mismatch in one error."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline.core.arrays import Array
from ridgeline.core.errors import (
    CorruptFileError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightsMismatchError,
)
from ridgeline.core.ops import Embed, Head, Norm, Op, Weight
from ridgeline.core.spec import NormKind, NormSpec
from ridgeline.kernels.tensors import as_tensor
from ridgeline.models import TensorSource
from ridgeline.weights import Checkpoint, CheckpointWeights, weight_shapes

RMS = NormSpec(kind=NormKind.RMS, eps=1e-6)
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def ops_for(count: int) -> list[Op]:
    """An embedding, ``count`` norms, and a head that is the embedding."""
    table = Weight(name="embed", shape=(12, 4))
    norms = [
        Norm(src="x", dst="h", weight=Weight(name=f"norm.{i}", shape=(4,)), spec=RMS)
        for i in range(count)
    ]
    return [Embed(weight=table, scale=1.0), *norms, Head(weight=table, softcap=None)]


def sources_for(ops: list[Op]) -> dict[str, TensorSource]:
    return {name: TensorSource(name=f"model.{name}") for name in weight_shapes(ops)}


def tensors_for(ops: list[Op], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        f"model.{name}": torch.randn(shape, generator=generator).to(dtype)
        for name, shape in weight_shapes(ops).items()
    }


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], count: int = 2) -> None:
    names = sorted(tensors)
    weight_map = {}
    for shard in range(count):
        file = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::count]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load(folder: Path, ops: list[Op], **options: object) -> dict[str, Array]:
    arguments = {"sources": sources_for(ops), "ignored": [], "dtype": "float32"} | options
    return dict(CheckpointWeights(path=folder, ops=ops, **arguments).values())


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("sharded", [False, True])
def test_equals_the_library(tmp_path: Path, stored: torch.dtype, sharded: bool) -> None:
    ops = ops_for(5)
    tensors = tensors_for(ops, stored)
    save_file(tensors, tmp_path / "all.safetensors")
    expected = load_file(tmp_path / "all.safetensors")
    if sharded:
        write_shards(tmp_path, tensors)
    else:
        (tmp_path / "all.safetensors").rename(tmp_path / "model.safetensors")
    for wanted in FLOATS:
        weights = load(tmp_path, ops, dtype=str(wanted).removeprefix("torch."))
        assert weights.keys() == weight_shapes(ops).keys()
        for name, weight in weights.items():
            assert as_tensor(weight).dtype == wanted
            assert torch.equal(as_tensor(weight), expected[f"model.{name}"].to(wanted))


def test_a_tied_head_is_read_once_and_progress_ends_at_the_total(tmp_path: Path) -> None:
    ops = ops_for(3)
    save_file(tensors_for(ops), tmp_path / "model.safetensors")
    calls: list[tuple[int, int, str]] = []
    options = {"sources": sources_for(ops), "ignored": [], "dtype": "bfloat16"}
    weights = CheckpointWeights(
        path=tmp_path, ops=ops, progress=lambda *call: calls.append(call), **options
    )
    names = [name for name, _ in weights.values()]
    assert sorted(names) == ["embed", "norm.0", "norm.1", "norm.2"]
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)
    assert calls[-1][:2] == (12 * 4 * 4 + 3 * 4 * 4,) * 2
    assert [call[2] for call in calls] == [f"loading {name}" for name in names]


def test_a_head_beside_its_tied_embedding_must_be_the_same(tmp_path: Path) -> None:
    ops = ops_for(1)
    tensors = tensors_for(ops)
    sources = sources_for(ops)
    sources["embed"] = replace(sources["embed"], copies=("head",))
    embed = tensors["model.embed"]
    save_file(tensors | {"head": embed.to(torch.float64)}, tmp_path / "model.safetensors")
    assert np.array_equal(load(tmp_path, ops, sources=sources)["embed"], embed)
    changed = embed.clone()
    changed[11, 3] += 1
    for head in (changed, embed[1:].clone(), embed.to(torch.int32)):
        save_file(tensors | {"head": head}, tmp_path / "model.safetensors")
        with pytest.raises(WeightsMismatchError, match=r"'head' differs from 'model\.embed'"):
            load(tmp_path, ops, sources=sources)


@pytest.mark.parametrize("row", [0, 4, 5, 11])
def test_a_tied_head_is_compared_to_its_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    """Rows are read five at a time, the last two by themselves."""
    monkeypatch.setattr("ridgeline.weights.matching._COMPARED_ELEMENTS", 5 * 4)
    ops = ops_for(1)
    tensors, sources = tensors_for(ops), sources_for(ops)
    sources["embed"] = replace(sources["embed"], copies=("head",))
    head = tensors["model.embed"].clone()
    save_file(tensors | {"head": head}, tmp_path / "model.safetensors")
    load(tmp_path, ops, sources=sources)
    head[row, 3] += 1
    save_file(tensors | {"head": head}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatchError, match="'head' differs"):
        load(tmp_path, ops, sources=sources)


def test_quantized_parts_that_the_config_does_not_mention_are_named(tmp_path: Path) -> None:
    ops = ops_for(1)
    tensors = tensors_for(ops)
    del tensors["model.norm.0"]
    tensors["model.norm.qweight"] = torch.zeros(2, 4, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        WeightsMismatchError, match=r"'model\.norm\.qweight' is part of a quantized"
    ):
        load(tmp_path, ops)


def test_nan_and_infinity_pass(tmp_path: Path) -> None:
    ops = ops_for(0)
    values = torch.full((12, 4), torch.nan)
    values[0, 0] = torch.inf
    save_file({"model.embed": values}, tmp_path / "model.safetensors")
    assert np.isnan(load(tmp_path, ops)["embed"]).sum() == 47


def test_all_mismatches_are_in_one_error(tmp_path: Path) -> None:
    ops = ops_for(12)
    tensors = tensors_for(ops)
    for i in range(10):
        del tensors[f"model.norm.{i}"]
        tensors[f"extra.{i:02}"] = torch.zeros(1)
    tensors["model.embed"] = torch.zeros(4, 12)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatchError) as caught:
        load(tmp_path, ops)
    text = str(caught.value)
    for part in ("10 missing", "10 left over", "1 of another shape", "and 2 more"):
        assert part in text
    assert "'model.norm.7'" in text
    assert "'model.norm.8'" not in text
    assert "'extra.07'" in text
    assert "'extra.08'" not in text
    assert "'model.embed' is [4, 12], not [12, 4]" in text


@pytest.mark.parametrize("change", ["missing", "left over", "shape"])
def test_one_mismatch_is_enough(tmp_path: Path, change: str) -> None:
    ops = ops_for(2)
    tensors = tensors_for(ops)
    if change == "missing":
        del tensors["model.norm.1"]
    elif change == "left over":
        tensors["model.norm.2"] = torch.zeros(4)
    else:
        tensors["model.norm.1"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatchError, match=change):
        load(tmp_path, ops)


def test_ignored_patterns_match_whole_names(tmp_path: Path) -> None:
    ops = ops_for(1)
    tensors = tensors_for(ops) | {"layers.0.rotary.inv_freq": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path, ops, ignored=[r".*\.inv_freq"])
    with pytest.raises(WeightsMismatchError, match="inv_freq"):
        load(tmp_path, ops, ignored=[r"inv_freq", r"layers\.0"])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantized_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    ops = ops_for(1)
    tensors = tensors_for(ops)
    tensors["model.norm.0"] = tensors["model.norm.0"].to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"'model\.norm\.0'"):
        load(tmp_path, ops)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    write_shards(tmp_path, tensors_for(ops_for(5)), 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"1 of the 3.*'model-00002-of-00003"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/x.safetensors", "..", "a/b.safetensors", "a\\b.safetensors", "x.bin",
     ".x.safetensors", "x\0.safetensors", "", 3, None, ["x.safetensors"], "é.safetensors"],
)  # fmt: skip
def test_shard_names_that_lead_elsewhere(tmp_path: Path, shard: object) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.zeros(1)}, tmp_path / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(CorruptFileError, match="same folder"):
        Checkpoint(folder)


def test_an_index_has_a_map_of_tensors_to_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    for text in ("{}", "[]", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": 1}'):
        path.write_text(text)
        with pytest.raises(CorruptFileError, match="has no weight_map"):
            Checkpoint(tmp_path)
    for text in ("{", '{"weight_map": {"a": "b", "a": "b"}}', "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(CorruptFileError, match="is not valid JSON"):
            Checkpoint(tmp_path)


def test_index_and_shards_that_disagree(tmp_path: Path) -> None:
    write_shards(tmp_path, tensors_for(ops_for(5)))
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for change in ({"ghost": "model-00001-of-00002.safetensors"}, {}):
        changed = index["weight_map"] | change
        if not change:
            changed["model.embed"] = "model-00002-of-00002.safetensors"
        path.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(CorruptFileError, match="'ghost'" if change else r"'model\.embed'"):
            Checkpoint(tmp_path)


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    tensors = tensors_for(ops_for(1))
    write_shards(tmp_path, tensors)
    save_file(tensors, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CorruptFileError, match="is both in"):
        Checkpoint(tmp_path)


def test_a_folder_without_weights_or_with_others(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        Checkpoint(tmp_path / "none")
    with pytest.raises(ModelNotFoundError, match=r"no model\.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModelError, match="pickle"):
        Checkpoint(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelNotFoundError, match="only as GGUF"):
        Checkpoint(tmp_path)
