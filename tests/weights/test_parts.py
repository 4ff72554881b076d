"""What a rank reads of a checkpoint: its rows of every weight, and no others."""

import os

import numpy as np
import pytest
import torch
from tests.parity.every_case import CASES
from tests.parity.oracle import _model

from ridgeline.core.config import EngineConfig
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.engine.loading import load_model
from ridgeline.models import shard
from ridgeline.weights import WeightSource, expanded, only_of, rows_of, weight_parts

# Tied, fused and transposed tensors; experts apart, in one tensor, and interleaved in it.
FAMILIES = ("llama", "phi3", "gpt2", "gemma2", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss")
LAYOUT = ParallelLayout(tensor=2)
STAGES = ParallelLayout(pipeline=2, stage_borders=(0, 1, 2))


def _checkpoint(family, folder):
    torch.manual_seed(3)
    _model(next(case for case in CASES if case.family == family)).save_pretrained(folder)
    return load_model(EngineConfig(model=str(folder), dtype="float32")).model


def _all(source: WeightSource):
    return {name: expanded(weight, "float32") for name, weight in source.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_rows_of_the_whole(family, tmp_path):
    model = _checkpoint(family, tmp_path)
    whole = _all(model.weights)
    for rank in range(2):
        rows = shard(model.spec, LAYOUT, rank).rows
        part = rows_of(model.weights, rows)
        found = _all(part)
        stacked: dict[str, dict] = {}
        for name, index, weight in weight_parts(part):
            if index is not None:
                stacked.setdefault(name, {})[index] = weight
        assert found.keys() == whole.keys() and rows.keys() <= whole.keys()
        for name, weight in found.items():
            wanted = whole[name][slice(*rows.get(name, (None, None)))]
            assert np.array_equal(weight, wanted), name
            if name in stacked:
                assert sorted(stacked[name]) == list(range(len(wanted)))
                assert all(np.array_equal(stacked[name][i], wanted[i]) for i in stacked[name]), name


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "gpt_oss"])
def test_a_rank_reads_its_share_of_the_file(family, tmp_path, monkeypatch):
    model = _checkpoint(family, tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    read = 0
    preadv = os.preadv

    def counted(descriptor, buffers, offset):
        nonlocal read
        count = preadv(descriptor, buffers, offset)
        read += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    for _ in weight_parts(model.weights):
        pass
    of_whole, read = read, 0
    for _ in weight_parts(rows_of(model.weights, shard(model.spec, LAYOUT, 1).rows)):
        pass
    of_rank, of_stages = read, []
    for stage in range(2):
        read = 0
        for _ in weight_parts(only_of(model.weights, shard(model.spec, STAGES, stage).ops)):
            pass
        of_stages.append(read)
    # Routers and norms are small, but for models as small as these.
    assert of_whole > 0.9 * size
    assert of_rank < 0.58 * of_whole
    assert sum(of_stages) <= 1.3 * of_whole and max(of_stages) < 0.8 * of_whole  # a tied head
