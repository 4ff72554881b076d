"""The paged cache gives back what was written, rounded as its format says, wherever it lies."""

import numpy as np
import pytest
import torch
from tests.kernels.cpu.native import FORMATS, LEVELS, Cache, Part
from tests.kernels.cpu.test_attention import rotated, width_of

pytestmark = pytest.mark.parametrize("level", LEVELS)


def stored(x: np.ndarray, number_format: str) -> np.ndarray:
    """What a value of [..., width] reads as."""
    if number_format == "int8":
        scale = np.abs(x).max(-1, keepdims=True, initial=0) / np.float32(127)
        return np.rint(x / np.where(scale > 0, scale, 1)) * scale
    if number_format == "fp8":
        scale = np.abs(x).max(-1, keepdims=True, initial=0) / np.float32(448)
        codes = torch.from_numpy(x / np.where(scale > 0, scale, 1)).to(torch.float8_e4m3fn)
        return codes.float().numpy() * scale
    if number_format == "int4":
        turned = rotated(x)
        scale = np.abs(turned).max(-1, keepdims=True) / np.float32(7)
        return rotated(np.rint(turned / scale) * scale)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[number_format]
    return torch.from_numpy(x).to(dtype).float().numpy()


def random_kv(kv: Cache, count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (count, kv.num_kv_heads)
    return (
        rng.standard_normal((*shape, kv.k_width), np.float32),
        rng.standard_normal((*shape, kv.v_width), np.float32),
    )


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize(("k_width", "v_width"), [(64, 64), (80, 80), (7, 19), (40, 0)])
def test_reads_what_was_written(level, number_format, k_width, v_width):
    kv = Cache(
        level=level,
        format=number_format,
        num_kv_heads=3,
        k_width=k_width,
        v_width=v_width,
        lengths=[70, 1, 33],
        block_tokens=32,
    )
    parts = [
        Part(sequence=2, start=0, num_tokens=33),
        Part(sequence=0, start=5, num_tokens=61),
        Part(sequence=1, start=0, num_tokens=1),
    ]
    k, v = random_kv(kv, 95)
    kv.write(parts, k, v)
    row = 0
    for part in parts:
        k_read, v_read = kv.read(part.sequence, part.start, part.num_tokens)
        rows = slice(row, row + part.num_tokens)
        # An element half way between two codes of int8 may go either way.
        tolerance = {"int8": {"atol": 0.03}, "int4": {"atol": 0.1}}.get(number_format, {"rtol": 0})
        np.testing.assert_allclose(k_read, stored(k[rows], number_format), **tolerance)
        np.testing.assert_allclose(v_read, stored(v[rows], number_format), **tolerance)
        if number_format == "int8":
            half_a_code = np.abs(k[rows]).max(-1, keepdims=True) / 127 * 0.5001
            assert (np.abs(k_read - k[rows]) <= half_a_code).all()
        row += part.num_tokens


@pytest.mark.parametrize("number_format", FORMATS)
def test_writes_nothing_else(level, number_format):
    kv = Cache(
        level=level,
        format=number_format,
        num_kv_heads=2,
        k_width=width_of(number_format, 24),
        v_width=width_of(number_format, 24),
        lengths=[64],
    )
    k, v = random_kv(kv, 64)
    kv.write([Part(sequence=0, start=0, num_tokens=64)], k, v)
    before = kv.read(0, 0, 64)
    kv.write([Part(sequence=0, start=20, num_tokens=3)], *random_kv(kv, 3, seed=2))
    after = kv.read(0, 0, 64)
    changed = (before[0] != after[0]).any(axis=(1, 2)) | (before[1] != after[1]).any(axis=(1, 2))
    assert np.flatnonzero(changed).tolist() == [20, 21, 22]
    assert (kv.memory.reshape(4, 2, -1)[:, 0] == 255).all(), "another layer was written"


@pytest.mark.parametrize("number_format", FORMATS)
@pytest.mark.parametrize("v_width", [20, 0])
def test_moves_slots_of_all_layers(level, number_format, v_width):
    kv = Cache(
        level=level,
        format=number_format,
        num_kv_heads=2,
        k_width=width_of(number_format, 10),
        v_width=v_width and width_of(number_format, v_width),
        lengths=[64],
    )
    before = []
    for layer in range(kv.num_layers):
        kv.layer = layer
        kv.write([Part(sequence=0, start=0, num_tokens=64)], *random_kv(kv, 64, layer))
        before.append(kv.read(0, 0, 64))
    # A path through a tree moves forward over itself; a swap shows that reads come first.
    sources, targets = [31, 33, 40, 3, 7], [31, 32, 33, 7, 3]
    kv.move(0, sources, targets)
    for layer in range(kv.num_layers):
        kv.layer = layer
        expected = [x.copy() for x in before[layer]]
        for x, old in zip(expected, before[layer], strict=True):
            x[targets] = old[sources]
        for got, want in zip(kv.read(0, 0, 64), expected, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("poison", ["nan", "inf"])
@pytest.mark.parametrize("number_format", FORMATS)
def test_what_is_not_finite_is_not_hidden(level, number_format, poison):
    kv = Cache(
        level=level,
        format=number_format,
        num_kv_heads=1,
        k_width=width_of(number_format, 16),
        v_width=width_of(number_format, 16),
        lengths=[16],
    )
    k, v = random_kv(kv, 16)
    k[4, 0, 3] = v[9, 0, 5] = float(poison)
    kv.write([Part(sequence=0, start=0, num_tokens=16)], k, v)
    k_read, v_read = kv.read(0, 0, 16)
    assert np.flatnonzero(~np.isfinite(k_read).all((1, 2))).tolist() == [4]
    assert np.flatnonzero(~np.isfinite(v_read).all((1, 2))).tolist() == [9]


def test_zeros_stay_zeros_in_int8(level):
    kv = Cache(level=level, format="int8", num_kv_heads=1, k_width=16, v_width=16, lengths=[16])
    zeros = np.zeros((16, 1, 16), np.float32)
    kv.write([Part(sequence=0, start=0, num_tokens=16)], zeros, zeros)
    np.testing.assert_array_equal(kv.read(0, 0, 16), [zeros, zeros])
