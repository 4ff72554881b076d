"""Experts' weights: stacked from one tensor each, over shards, and taken from interleaved ones."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.tiny import EXPERTS, SINKS

from ridgeline.core.errors import WeightsMismatchError
from ridgeline.models import describe, lower
from ridgeline.weights import CheckpointWeights, weight_shapes


def definition_of(config):
    definition = describe(config | {"num_hidden_layers": 1})
    return definition, lower(definition.spec)


def random_checkpoint(definition, ops):
    """Tensors of a per-expert checkpoint, and the weights that should come of it."""
    tensors, weights = {}, {}
    for name, shape in weight_shapes(ops).items():
        weights[name] = torch.randn(shape)
        source = definition.sources[name]
        parts = range(shape[0]) if "{e}" in source.name else ()
        for index in parts:
            tensors[source.of_expert(index).name] = weights[name][index].clone()
        if not parts:
            tensors[source.name] = weights[name]
    return tensors, weights


def load(folder, definition, ops):
    weights = CheckpointWeights(
        path=folder,
        ops=ops,
        sources=definition.sources,
        ignored=definition.ignored,
        dtype="float32",
    )
    return dict(weights.values())


def test_experts_scattered_over_shards(tmp_path):
    definition, ops = definition_of(EXPERTS)
    tensors, expected = random_checkpoint(definition, ops)
    shard_of = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for shard in set(shard_of.values()):
        save_file({n: t for n, t in tensors.items() if shard_of[n] == shard}, tmp_path / shard)
    index = {"metadata": {}, "weight_map": shard_of}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = load(tmp_path, definition, ops)
    assert weights.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(weights[name], values)
        assert weights[name].flags.c_contiguous


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_each_expert_is_checked(tmp_path, change):
    definition, ops = definition_of(EXPERTS)
    tensors, _ = random_checkpoint(definition, ops)
    name = "model.layers.0.block_sparse_moe.experts.{}.w2.weight"
    match change:
        case "missing":
            del tensors[name.format(3)]
        case "extra":
            tensors[name.format(5)] = tensors[name.format(4)].clone()
        case "shape":
            tensors[name.format(3)] = tensors[name.format(3)].T.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatchError, match=r"experts\.[35]\.w2"):
        load(tmp_path, definition, ops)


def test_interleaved_and_transposed_experts(tmp_path):
    definition, ops = definition_of(SINKS)
    expected = {name: torch.randn(shape) for name, shape in weight_shapes(ops).items()}
    tensors = {
        definition.sources[name].name: values
        for name, values in expected.items()
        if "experts" not in name
    }
    block, experts = "model.layers.0.mlp.experts.", "layers.0.experts."
    gate_up = torch.stack([expected[f"{experts}gate"], expected[f"{experts}up"]], dim=2)
    tensors[f"{block}gate_up_proj"] = gate_up.flatten(1, 2).mT.contiguous()
    biases = [expected[f"{experts}{name}_bias"] for name in ("gate", "up")]
    tensors[f"{block}gate_up_proj_bias"] = torch.stack(biases, dim=-1).flatten(1)
    tensors[f"{block}down_proj"] = expected[f"{experts}down"].mT.contiguous()
    tensors[f"{block}down_proj_bias"] = expected[f"{experts}down_bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load(tmp_path, definition, ops)
    for name, values in expected.items():
        assert np.array_equal(weights[name], values), name
        assert weights[name].flags.c_contiguous
    wider = replace(definition.spec.layers[0].mlp, width=20)
    layers = (replace(definition.spec.layers[0], mlp=wider),)
    with pytest.raises(WeightsMismatchError, match="gate_up_proj"):
        load(tmp_path, definition, lower(replace(definition.spec, layers=layers)))
