"""Norms, activations and rotary positions against the reference ops."""

import pytest
import torch
from tests.kernels.triton.device import DEVICE, DTYPES, assert_near, random

from ridgeline.core.spec import Activation, ClampedSwiGLU, NormKind, NormSpec
from ridgeline.kernels import reference
from ridgeline.kernels.triton import (
    activate,
    layer_bytes,
    layer_tensors,
    move_slots,
    normalise,
    quantize_rows,
    rope_and_write,
)
from ridgeline.kernels.triton.activation import KINDS

EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]
SPECS = [
    NormSpec(kind=NormKind.RMS, eps=1e-5),
    NormSpec(kind=NormKind.RMS, eps=1e-6, unit_offset=True),
    NormSpec(kind=NormKind.LAYER, eps=1e-5, bias=True),
    NormSpec(kind=NormKind.LAYER, eps=1e-5, gain=False),
]


def assert_codes(codes, scales, expected):
    """Within half a step of int8, within a part in 16 of float8's three bits of mantissa."""
    expected, found = expected.float(), codes.float() * scales[:, None]
    largest = expected.abs().amax(-1, keepdim=True)
    step = largest / 254 if codes.dtype == torch.int8 else expected.abs() / 16 + largest / 1e5
    assert ((found - expected).abs() <= step * 1.01 + 1e-7).all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm(spec, dtype):
    x = random(5, 100, dtype=dtype) + 1
    weight = random(100, seed=2, dtype=dtype) if spec.gain else None
    bias = random(100, seed=3, dtype=dtype) if spec.bias else None
    expected = reference.normalise(x, weight, spec, bias=bias)
    out = torch.full_like(x, float("nan"))
    normalise(x, out, spec, weight=weight, bias=bias)
    assert_near(out, expected, dtype)


@pytest.mark.parametrize("kind", EIGHT_BITS, ids=str)
def test_rows_are_quantized_each_by_a_scale(kind):
    x = random(4, 96)
    x[2] = 0
    codes = torch.zeros(x.shape, dtype=kind, device=DEVICE)
    scales = torch.full((4,), float("nan"), device=DEVICE)
    quantize_rows(x, codes, scales)
    assert_codes(codes, scales, x)
    assert not codes[2].float().any()
    with pytest.raises(ValueError, match="int8"):
        quantize_rows(x, x, scales)


def test_a_norm_of_part_of_each_row_leaves_the_rest():
    rows = random(3, 24)
    before = rows.clone()
    normalise(rows[:, :16], rows[:, :16], SPECS[0])
    assert_near(rows[:, :16], reference.normalise(before[:, :16], None, SPECS[0]), torch.float32)
    assert torch.equal(rows[:, 16:], before[:, 16:])


@pytest.mark.parametrize("kind", [*KINDS, ClampedSwiGLU(alpha=1.7, limit=1.0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(kind, dtype):
    both = random(3, 2, 70, dtype=dtype, scale=2.0)
    gate, up = both[:, 0], both[:, 1]
    out = torch.full((3, 70), float("nan"), dtype=dtype, device=DEVICE)
    activate(up, out, kind, gate_TF=gate)
    assert_near(out, reference.gated(gate.float(), up.float(), kind), dtype)
    if isinstance(kind, Activation):
        activate(up, out, kind)
        assert_near(out, reference.activate(up.float(), kind), dtype)
    else:
        with pytest.raises(ValueError, match="gate"):
            activate(up, out, kind)


PAGE, TOKENS, HEADS, KV_HEADS, WIDTH = 4, 6, 5, 2, 24


def cache(kind, kv_heads=KV_HEADS, width=WIDTH, v_width=WIDTH, latent=None):
    shape = {
        "num_kv_heads": kv_heads, "block_tokens": PAGE, "k_width": width, "v_width": v_width,
    }  # fmt: skip
    pool = torch.zeros(5, layer_bytes(kind, **shape), dtype=torch.uint8, device=DEVICE)
    return layer_tensors(pool, kind, latent_dim=latent, **shape)


def stored(kv, slots):
    """K and V at flat slots, as floats."""
    blocks, offsets = slots // PAGE, slots % PAGE
    parts = []
    for values, scales in ((kv.k, kv.k_scales), (kv.v, kv.v_scales)):
        part = values.float()[blocks, :, offsets]
        parts.append(part if scales is None else part * scales[blocks, :, offsets][..., None])
    return parts


def tables(rotary, positions=40):
    angles = random(positions, rotary // 2, seed=9)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("interleaved", "norm", "dtype"),
    [
        (False, None, torch.float32),
        (True, "head", torch.float32),
        (False, "each_head", torch.float32),
        (True, None, torch.float16),
        (False, "head", torch.bfloat16),
    ],
    ids=str,
)
def test_heads_are_normed_rotated_and_stored(interleaved, norm, dtype):
    qkv = random(TOKENS, HEADS + 2 * KV_HEADS, WIDTH, dtype=dtype)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    before = [part.clone() for part in (q, k, v)]
    cos, sin = tables(16)
    positions = torch.tensor([3, 0, 39, 7, 1, 2], device=DEVICE)
    slots = torch.tensor([7, 0, 18, 13, 19, 2], device=DEVICE)
    spec, gains = NormSpec(kind=NormKind.RMS, eps=1e-6, unit_offset=True), (None, None)
    expected = [part.float() for part in before[:2]]
    if norm is not None:
        shapes = [(h, WIDTH) if norm == "each_head" else (WIDTH,) for h in (HEADS, KV_HEADS)]
        gains = tuple(random(*shape, seed=6, dtype=dtype) for shape in shapes)
        expected = [
            reference.normalise(part, gain, spec).float()
            for part, gain in zip(before[:2], gains, strict=True)
        ]
    rows = (cos[positions], sin[positions])
    for index, start in enumerate((0, 8)):
        expected[index] = reference.rotate(
            expected[index], rows, start=start, interleaved=interleaved
        )
    kv = cache(dtype)
    rope_and_write(
        q, k, v, cos=cos, sin=sin, rows_T=positions, kv=kv, slots_T=slots, interleaved=interleaved,
        query_start=0, key_start=8, query_norm=gains[0], key_norm=gains[1],
        norm_spec=spec if norm else None,
    )  # fmt: skip
    assert_near(q, expected[0], dtype)
    assert torch.equal(k, before[1])
    found_k, found_v = stored(kv, slots)
    assert_near(found_k, expected[1], dtype)
    assert torch.equal(found_v, before[2].float())
    written = torch.zeros(5 * PAGE, dtype=torch.bool, device=DEVICE)
    written[slots] = True
    rest, _ = stored(kv, (~written).nonzero()[:, 0])
    assert not rest.any()


@pytest.mark.parametrize("kind", EIGHT_BITS, ids=str)
def test_heads_are_quantized_each_by_a_scale(kind):
    q, k, v = (random(TOKENS, h, WIDTH, seed=h) for h in (HEADS, KV_HEADS, KV_HEADS))
    slots = torch.tensor([7, 0, 18, 13, 19, 2], device=DEVICE)
    kv = cache(kind)
    rope_and_write(q, k, v, kv=kv, slots_T=slots)
    for found, exact in zip(stored(kv, slots), (k, v), strict=True):
        error = (found - exact).abs() / exact.abs().amax(-1, keepdim=True)
        assert error.max() < (1 / 250 if kind == torch.int8 else 1 / 28)


def test_latents_are_stored_without_values_and_slots_move():
    q, k = random(TOKENS, HEADS, 20), random(TOKENS, 1, 24)
    cos, sin = tables(8)
    positions = torch.arange(TOKENS, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([7, 0, 18, 13, 19, 2], device=DEVICE)
    rows = (cos[:TOKENS], sin[:TOKENS])
    expected = reference.rotate(q.clone(), rows, start=12)
    expected_k = reference.rotate(k, rows, start=16)
    kv = cache(torch.float32, kv_heads=1, width=24, v_width=0, latent=16)
    assert kv.is_latent
    rope_and_write(
        q, k, None, cos=cos, sin=sin, rows_T=positions, kv=kv, slots_T=slots,
        query_start=12, key_start=16,
    )  # fmt: skip
    assert_near(q, expected, torch.float32)
    found_k, found_v = stored(kv, slots)
    assert_near(found_k, expected_k, torch.float32)
    assert torch.equal(found_v, found_k[..., :16])
    move_slots(kv, slots[[1, 0]], slots[[0, 3]])
    moved, _ = stored(kv, slots[[0, 3]])
    assert torch.equal(moved, found_k[[1, 0]])
    with pytest.raises(ValueError, match="rows_T"):
        rope_and_write(q, k, None, cos=cos, sin=sin, kv=kv, slots_T=slots)
