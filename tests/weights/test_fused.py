"""Weights that share a tensor, transposed tensors, and tensors with several names."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ridgeline.core.errors import WeightsMismatchError
from ridgeline.core.ops import Head, Op, Weight
from ridgeline.models import TensorSource
from ridgeline.weights import CheckpointWeights
from ridgeline.weights.matching import open_checkpoint
from ridgeline.weights.storing import stored_tensors

FUSED = torch.arange(54.0).view(9, 6)
SOURCES = {
    "q": TensorSource(name="qkv", rows=(0, 4)),
    "k": TensorSource(name="qkv", rows=(4, 6)),
    "v": TensorSource(name="qkv", rows=(6, 9)),
}


def ops_of(**shapes: tuple[int, ...]) -> list[Op]:
    return [Head(weight=Weight(name=n, shape=s), softcap=None) for n, s in shapes.items()]


SPLIT = ops_of(q=(4, 6), k=(2, 6), v=(3, 6))


def load(folder: Path, tensors: dict[str, torch.Tensor], ops: list[Op], **options: object):
    save_file(tensors, folder / "model.safetensors")
    arguments = {"sources": SOURCES, "ignored": [], "dtype": "float32"} | options
    return dict(CheckpointWeights(path=folder, ops=ops, **arguments).values())


def transposed(sources: dict[str, TensorSource]) -> dict[str, TensorSource]:
    return {
        name: TensorSource(name=source.name, rows=source.rows, transpose=True)
        for name, source in sources.items()
    }


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transpose", [False, True])
def test_split(tmp_path: Path, stored: torch.dtype, transpose: bool) -> None:
    tensor = FUSED.to(stored)
    calls: list[tuple[int, int, str]] = []
    weights = load(
        tmp_path,
        {"qkv": tensor.T.contiguous() if transpose else tensor},
        SPLIT,
        sources=transposed(SOURCES) if transpose else SOURCES,
        progress=lambda *call: calls.append(call),
    )
    for name, (start, stop) in {"q": (0, 4), "k": (4, 6), "v": (6, 9)}.items():
        assert np.array_equal(weights[name], tensor[start:stop].float())
        assert weights[name].flags.c_contiguous
        assert weights[name].base is None
    assert calls[-1][:2] == (tensor.nbytes, tensor.nbytes)


def test_split_vector(tmp_path: Path) -> None:
    weights = load(tmp_path, {"qkv": torch.arange(9.0)}, ops_of(q=(4,), k=(2,), v=(3,)))
    assert weights["k"].tolist() == [4.0, 5.0]


def test_whole_and_transposed(tmp_path: Path) -> None:
    sources = {"o": TensorSource(name="o", transpose=True)}
    weights = load(tmp_path, {"o": FUSED}, ops_of(o=(6, 9)), sources=sources)
    assert np.array_equal(weights["o"], FUSED.T)
    assert weights["o"].flags.c_contiguous


@pytest.mark.parametrize(
    ("shape", "sources", "message"),
    [
        ((8, 6), SOURCES, r"1 of another shape: 'qkv' is \[8, 6\], not \[9, 6\]"),
        ((10, 6), SOURCES, r"1 of another shape: 'qkv' is \[10, 6\], not \[9, 6\]"),
        ((9, 6), transposed(SOURCES), r"1 of another shape: 'qkv' is \[9, 6\], not \[6, 9\]"),
        ((9,), SOURCES, r"1 of another shape: 'qkv' is \[9\], not \[9, 6\]"),
    ],
)
def test_shapes_are_of_the_tensor_in_the_file(
    tmp_path: Path, shape: tuple[int, ...], sources: dict[str, TensorSource], message: str
) -> None:
    with pytest.raises(WeightsMismatchError, match=message):
        load(tmp_path, {"qkv": torch.zeros(shape)}, SPLIT, sources=sources)


def test_a_fused_tensor_is_missing_once(tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatchError, match=r"\(1 missing: 'qkv'; 1 left over: 'other'\)"):
        load(tmp_path, {"other": FUSED}, SPLIT)


def test_other_names(tmp_path: Path) -> None:
    sources = {"o": TensorSource(name="model.o", other_names=("o",))}
    ops = ops_of(o=(9, 6))
    for name in ("model.o", "o"):
        assert np.array_equal(load(tmp_path, {name: FUSED}, ops, sources=sources)["o"], FUSED)
    with pytest.raises(WeightsMismatchError, match=r"1 left over: 'o'"):
        load(tmp_path, {"model.o": FUSED, "o": FUSED.clone()}, ops, sources=sources)
    with pytest.raises(WeightsMismatchError, match=r"1 missing: 'model\.o'"):
        load(tmp_path, {"x": FUSED}, ops, sources=sources)


def test_a_weight_that_the_family_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatchError, match="1 missing: 'mystery'"):
        load(tmp_path, {"qkv": FUSED}, [*SPLIT, *ops_of(mystery=(1,))])


def test_weights_are_stored_where_they_are_read(tmp_path: Path) -> None:
    """`stored_tensors` is the inverse of loading, whatever the place."""
    generator = np.random.default_rng(0)
    sources = {
        "q": TensorSource(name="qk", rows=(0, 4), transpose=True),
        "k": TensorSource(name="qk", rows=(4, 6), transpose=True),
        "gate": TensorSource(name="gate_up", every_other=0),
        "up": TensorSource(name="gate_up", every_other=1),
        "first": TensorSource(name="each", of_each=(3, 0, 2)),
        "second": TensorSource(name="each", of_each=(3, 2, 3)),
        "conv": TensorSource(name="conv", squeeze=True),
        "experts": TensorSource(name="experts.{e}"),
        "in": TensorSource(name="in_out", rows=(0, 3)),
        "out": TensorSource(name="in_out", rows=(3, 5)),
        "turned": TensorSource(name="turned", transpose=True),
    }
    shapes = {
        "q": (4, 6), "k": (2, 6), "gate": (5,), "up": (5,), "first": (8, 2), "second": (4, 2),
        "conv": (3, 4), "experts": (2, 3, 4), "in": (2, 3, 4), "out": (2, 2, 4),
        "turned": (2, 3, 4),
    }  # fmt: skip
    weights = {n: generator.random(shape, dtype=np.float32) for n, shape in shapes.items()}
    like = {
        "qk": torch.zeros(6, 6), "gate_up": torch.zeros(10), "each": torch.zeros(12, 2),
        "conv": torch.zeros(3, 1, 4), "experts.0": torch.zeros(3, 4),
        "experts.1": torch.zeros(3, 4), "in_out": torch.zeros(2, 5, 4),
        "turned": torch.zeros(2, 4, 3),
    }  # fmt: skip
    save_file(like, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        tensors = stored_tensors(weights, sources, checkpoint)
    assert {name: t.shape for name, t in tensors.items()} == {n: t.shape for n, t in like.items()}
    assert np.array_equal(tensors["qk"].T, np.concatenate([weights["q"], weights["k"]]))
    assert np.array_equal(tensors["gate_up"][::2], weights["gate"])
    assert np.array_equal(tensors["each"][[2, 5, 8, 11]], weights["second"])
    found = load(
        tmp_path,
        {name: torch.from_numpy(values) for name, values in tensors.items()},
        ops_of(**shapes),
        sources=sources,
    )
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        assert np.array_equal(found[name], values), name
