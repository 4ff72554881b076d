"""Packed weights that are kept on disk: the same bytes, or none."""

import json
import logging
import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.rounding import round_up
from ridgeline.engine.loading import load_model
from ridgeline.executors.cpu import packed_cache
from ridgeline.executors.cpu.packed_cache import PackedCache, open_packed_cache
from ridgeline.executors.cpu.weights import PackedWeights, pack_weights
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.cpu.library import available_levels, native_kernels_run
from ridgeline.kernels.cpu.pool import shared_pool

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="the native kernels are not built")


def loaded(model: Path, quantization: str | None) -> ExecutorModel:
    config = EngineConfig(model=str(model), dtype="bfloat16", quantization=quantization)
    return load_model(config).model


def pack(cache: PackedCache, model: Path, quantization: str | None = "int4") -> PackedWeights:
    return cache.pack(shared_pool(), loaded(model, quantization))


def pack_on(level: str, cache: PackedCache, model: Path) -> PackedWeights:
    return cache.pack(shared_pool(level), loaded(model, "int4"))


def fresh(model: Path) -> PackedWeights:
    return pack_weights(shared_pool(), loaded(model, "int4"))


def assert_same(found: PackedWeights, wanted: PackedWeights) -> None:
    assert found.matrices.keys() == wanted.matrices.keys()
    assert found.vectors.keys() == wanted.vectors.keys()
    for name, matrices in wanted.matrices.items():
        for one, other in zip(found.matrices[name], matrices, strict=True):
            assert np.array_equal(one.data, other.data), name
            for field in ("format", "rows", "columns", "group", "has_min", "multiplier"):
                assert getattr(one.struct, field) == getattr(other.struct, field), name
    for name, vector in wanted.vectors.items():
        assert np.array_equal(found.vectors[name], vector), name


@pytest.fixture
def model(tmp_path: Path, model_folder: Path) -> Path:
    return shutil.copytree(model_folder, tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    return PackedCache(folder=tmp_path / "cache", max_bytes=2**30, min_bytes=0)


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one whenever weights are packed."""
    done: list[object] = []

    def counted(*arguments):
        done.append(arguments[1])
        return pack_weights(*arguments)

    monkeypatch.setattr(packed_cache, "pack_weights", counted)
    return done


def files(cache: PackedCache) -> list[Path]:
    return sorted(cache.folder.glob("*.packed"))


def test_kernels_that_round_otherwise_pack_for_themselves(cache, model, packings) -> None:
    for level in ("generic", available_levels()[-1]):
        pack_on(level, cache, model)
    assert len(files(cache)) == len({"generic", available_levels()[-1]}) == len(packings)


def test_a_second_start_maps_what_the_first_one_packed(cache, model, packings) -> None:
    for count in (1, 1, 1):
        assert_same(pack(cache, model), fresh(model))
        assert len(packings) == count
    assert len(files(cache)) == 1
    assert list(cache.folder.glob("*.tmp")) == []


def test_other_formats_and_other_weights_are_other_files(cache, model, packings) -> None:
    for quantization in ("int4", "int8", "int4-g64", None):
        pack(cache, model, quantization)
    assert len(files(cache)) == len(packings) == 4
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name][3, 5] += 1.0  # one element, in a file of the same size
    save_file(tensors, model / "model.safetensors")
    assert_same(pack(cache, model), fresh(model))
    assert len(files(cache)) == len(packings) == 5
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 123.0}))
    pack(cache, model)
    assert len(packings) == 6


@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "header", "tensor", "magic"])
def test_a_damaged_file_is_made_again(cache, model, packings, damage, caplog) -> None:
    wanted = pack(cache, model)
    (path,) = files(cache)
    data = bytearray(path.read_bytes())
    match damage:
        case "cut":
            data = data[:-4096]
        case "longer":
            data += bytes(1)
        case "empty":
            data = bytearray()
        case "header":
            data[60] ^= 1
        case "tensor":
            header = 48 + int.from_bytes(data[8:16], "little")
            data[round_up(header, 4096)] ^= 1
        case "magic":
            data[0] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert_same(pack(cache, model), fresh(model))
    assert "made again" in caplog.text
    assert len(packings) == 2
    assert_same(pack(cache, model), wanted)
    assert len(packings) == 2


def test_the_files_used_longest_ago_go_first(cache, model) -> None:
    for age, quantization in enumerate(("int8", "int4", "int4-g64")):
        pack(cache, model, quantization)
        newest = max(files(cache), key=lambda file: file.stat().st_mtime_ns)
        os.utime(newest, (1000 + age, 1000 + age))
    oldest_first = sorted(files(cache), key=lambda file: file.stat().st_mtime)
    pack(cache, model, "int8")  # used again
    room = sum(file.stat().st_size for file in oldest_first) + 1000
    small = PackedCache(folder=cache.folder, max_bytes=room, min_bytes=0)
    pack(small, model, "int4-g128")
    left = files(cache)
    assert oldest_first[0] in left
    assert oldest_first[1] not in left
    assert sum(file.stat().st_size for file in left) <= room


def test_no_room_and_no_rights_cost_only_time(tmp_path, model, packings, caplog) -> None:
    (tmp_path / "file").write_text("")
    unusable = PackedCache(folder=tmp_path / "file", max_bytes=2**30, min_bytes=0)
    assert_same(pack(unusable, model), fresh(model))
    assert "could not be kept" in caplog.text


@pytest.mark.parametrize("expected", [None, 0], ids=["before", "after"])
def test_what_the_cache_cannot_hold_is_said_once(
    tmp_path, model, packings, monkeypatch, caplog, expected
) -> None:
    """Before the checkpoint is read for its digest, if that can be known."""
    wanted = fresh(model)
    room = wanted.num_bytes - 1
    cache = PackedCache(folder=tmp_path / "tiny", max_bytes=room, min_bytes=0)
    if expected is not None:
        monkeypatch.setattr(packed_cache, "expected_bytes", lambda *_: expected)
    assert_same(pack(cache, model), wanted)
    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"{wanted.num_bytes / 1e9:.2f} GB" in told
    assert f"packed_cache_bytes is {room / 1e9:.2f} GB" in told
    assert len(packings) == 1
    assert cache.folder.exists() == (expected is not None)
    assert files(cache) == []


def test_the_packed_weights_of_another_user(cache, model, packings, monkeypatch, caplog) -> None:
    """They can be read, and their times cannot be changed."""
    wanted = pack(cache, model)
    monkeypatch.setattr(os, "utime", _refuse)
    with caplog.at_level(logging.WARNING):
        assert_same(pack(cache, model), wanted)
    assert len(packings) == 1
    assert caplog.messages == []


def _refuse(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_small_checkpoints_and_random_weights_are_not_kept(tmp_path, model) -> None:
    cache = PackedCache(folder=tmp_path / "cache", max_bytes=2**30)
    pack(cache, model)
    loaded = load_model(EngineConfig(model=str(model), load_format="dummy")).model
    PackedCache(folder=cache.folder, max_bytes=2**30, min_bytes=0).pack(shared_pool(), loaded)
    assert not cache.folder.exists()


def _pack_once(folder: str, model: str) -> None:
    pack(PackedCache(folder=Path(folder), max_bytes=2**30, min_bytes=0), Path(model))


def test_processes_that_start_at_once(cache, model, packings) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (str(cache.folder), str(model))
    workers = [context.Process(target=_pack_once, args=arguments) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert_same(pack(cache, model), fresh(model))
    assert packings == []
    assert len(files(cache)) == 1


def test_generation_from_mapped_weights(cache, model, monkeypatch, packings) -> None:
    outputs = []
    for used in (None, cache, cache):
        opened = "ridgeline.executors.cpu.packed_cache.open_packed_cache"
        monkeypatch.setattr(opened, lambda *_, used=used, **_settings: used)
        with LLM(str(model), quantization="int4", executor="cpu") as llm:
            params = SamplingParams(temperature=0.0, max_tokens=12)
            outputs.append(llm.generate(["the cat"], params)[0].outputs[0].token_ids)
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(packings) == 1


def test_settings_choose_the_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_packed_cache("off", 7) is None
    chosen = open_packed_cache("/x", 7)
    assert chosen == PackedCache(folder=Path("/x"), max_bytes=7, keep_random=True)
    default = open_packed_cache("auto", 7)
    assert default is not None
    assert default.folder == tmp_path / "ridgeline" / "packed"
    assert not default.keep_random


def test_random_weights_are_kept_if_that_is_asked_for(tmp_path, model, packings) -> None:
    cache = PackedCache(folder=tmp_path / "cache", max_bytes=2**30, keep_random=True)
    for seed, count in ((0, 1), (0, 1), (1, 2)):
        config = EngineConfig(model=str(model), load_format="dummy", seed=seed, quantization="int8")
        found = cache.pack(shared_pool(), load_model(config).model)
        assert len(packings) == count
        assert_same(found, pack_weights(shared_pool(), load_model(config).model))
