"""Random weights: deterministic, independent of order, and of the right scale."""

import numpy as np
import pytest

from ridgeline.core.ops import MLP, Embed, Head, HeadNorm, Norm, Op, QKVProject, Weight
from ridgeline.core.spec import Activation, NormKind, NormSpec
from ridgeline.weights import dummy_weights, weight_shapes
from ridgeline.weights.dummy import _hash

RMS = NormSpec(kind=NormKind.RMS, eps=1e-6)
GEMMA = NormSpec(kind=NormKind.RMS, eps=1e-6, unit_offset=True)


def weight(name: str, *shape: int) -> Weight:
    return Weight(name=name, shape=shape)


OPS: list[Op] = [
    Embed(weight=weight("embed", 3000, 512), scale=1.0),
    Norm(src="x", dst="h", weight=weight("norm", 512), spec=RMS),
    Norm(src="x", dst="h", weight=weight("gemma_norm", 512), spec=GEMMA),
    HeadNorm(
        query=weight("q_norm", 64),
        key=weight("k_norm", 64),
        spec=GEMMA,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
    ),
    QKVProject(
        query=weight("q", 512, 512),
        key=weight("k", 128, 512),
        value=weight("v", 128, 512),
        query_bias=weight("q_bias", 512),
        key_bias=weight("k_bias", 128),
        value_bias=None,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
    ),
    MLP(
        gate=weight("gate", 2048, 512),
        up=weight("up", 2048, 512),
        down=weight("down", 512, 2048),
        up_bias=None,
        gate_bias=None,
        down_bias=weight("down_bias", 512),
        activation=Activation.SILU,
    ),
    Head(weight=weight("embed", 3000, 512), softcap=None),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_shapes_and_scale(dtype: str) -> None:
    weights = dummy_weights(OPS, dtype=dtype, seed=1)
    assert {n: tuple(w.shape) for n, w in weights.items()} == weight_shapes(OPS)
    assert {w.dtype.name for w in weights.values()} == {dtype}
    for name, value in {
        "norm": 1,
        "gemma_norm": 0,
        "q_norm": 0,
        "q_bias": 0,
        "down_bias": 0,
    }.items():
        assert (weights[name] == value).all()
    for name, std in {"embed": 0.02, "q": 512**-0.5, "up": 512**-0.5, "down": 2048**-0.5}.items():
        values = weights[name].astype(np.float32)
        assert values.std() == pytest.approx(std, rel=0.02)
        assert abs(values.mean()) < 0.01 * std
        assert np.abs(values).max() > 4 * std  # tails, not a uniform block


def test_depends_on_seed_and_name_not_on_order() -> None:
    first = dummy_weights(OPS, dtype="bfloat16", seed=1)
    again = dummy_weights(OPS[::-1], dtype="bfloat16", seed=1)
    other = dummy_weights(OPS, dtype="bfloat16", seed=2)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["q"], other["q"])
    assert not np.array_equal(first["gate"], first["up"])


def test_rows_differ_over_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    table = weight("embed", 4097, 1024)  # four blocks long
    values = dummy_weights([Embed(weight=table, scale=1.0)], dtype="float32", seed=0)["embed"]
    assert len(np.unique(values[:, :8], axis=0)) == 4097
    assert np.abs(np.corrcoef(values[::1024]) - np.eye(5)).max() < 0.2


def test_the_same_in_every_process() -> None:
    # hash() of a string is not.
    assert _hash("layers.0.q", 5) == 8080160823393367156
    assert _hash("layers.0.q", 6) != _hash("layers.0.q", 5)
