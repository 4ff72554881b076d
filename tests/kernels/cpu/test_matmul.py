"""Packing and products of matrices, on every instruction-set level of this machine."""

import numpy as np
import pytest
import torch
from tests.kernels.cpu.native import LEVELS, pool

from ridgeline.kernels.cpu.matrix import MatrixFormat, pack, pack_codes
from ridgeline.kernels.cpu.structs import RlFormat

SHAPES = [(16, 33), (37, 100), (64, 256), (100, 513)]  # rows and columns, whole tiles or not
TOKENS = [1, 2, 3, 5, 6, 8, 13, 16]
# From 73 tokens on every level expands codes of Q5 and Q6; panels of 513 tokens by 2,100 columns
# are passed in several blocks.
PROMPT_TOKENS, WIDE = (73, 513), (70, 2100)
FLOATS = [MatrixFormat(format=form) for form in (RlFormat.F32, RlFormat.F16, RlFormat.BF16)]
QUANTIZED = [
    MatrixFormat(format=form, group=group)
    for form in (RlFormat.Q2, RlFormat.Q3, RlFormat.Q4, RlFormat.Q5, RlFormat.Q6, RlFormat.Q8)
    for group in (16, 32, 64, 128, None)
]
FACTORED = [
    MatrixFormat(format=form, group=128, has_factors=True)
    for form in (RlFormat.Q2, RlFormat.Q3, RlFormat.Q4)
]
QUANTIZED += FACTORED
# Largest error of a packed element, as a share of the largest one of its group: half a step of the
# codes, and what the least-squares scale may clip of the extreme.
ELEMENT_ERRORS = {
    RlFormat.Q2: 0.68, RlFormat.Q3: 0.4, RlFormat.Q4: 0.22, RlFormat.Q5: 0.13, RlFormat.Q6: 0.06,
    RlFormat.Q8: 0.0045,
}  # fmt: skip
# Activations are bytes: half a step of the largest of their group, averaged over the columns.
PRODUCT_ERROR = 0.01
ROUNDS_BFLOATS = ("avx512bf16", "avx512amx")  # levels that round activations beside bfloats


def name_of(form):
    return f"{form.format.name}-{form.group}" + ("-factors" if form.has_factors else "")


each_level = pytest.mark.parametrize("level", LEVELS)
each_format = pytest.mark.parametrize("form", FLOATS + QUANTIZED, ids=lambda form: name_of(form))


def weights(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 0.02).numpy()


@each_level
@each_format
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_elements_are_close_to_the_weights(level, form, shape):
    threads, weight = pool(level, 2), weights(*shape)
    unpacked = pack(threads, weight, form).unpack(threads, np.arange(shape[0], dtype=np.int32))
    error = np.abs(unpacked - weight)
    if not form.format.is_quantized:
        bits = {RlFormat.F32: 24, RlFormat.F16: 11, RlFormat.BF16: 8}[form.format]
        assert (error <= np.abs(weight) * 2.0**-bits + 1e-7).all()
        return
    group = 32 if form.has_factors else form.group or shape[1]
    for first in range(0, shape[1], group):
        part = slice(first, first + group)
        largest = np.abs(weight[:, part]).max(1)
        assert (error[:, part].max(1) <= ELEMENT_ERRORS[form.format] * largest).all()


@each_level
@each_format
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_those_of_the_unpacked_weights(level, form, shape):
    threads, weight = pool(level, 2), weights(*shape)
    matrix = pack(threads, weight, form)
    unpacked = matrix.unpack(threads, np.arange(shape[0], dtype=np.int32)).astype(np.float64)
    x = np.random.default_rng(1).normal(size=(max(TOKENS), shape[1])).astype(np.float32)
    expected = x @ unpacked.T
    rounds = form.format.is_quantized or (form.format is RlFormat.BF16 and level in ROUNDS_BFLOATS)
    scale = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(unpacked, axis=1)
    bound = PRODUCT_ERROR if rounds else 1e-6
    assert (np.abs(matrix.matmul(threads, x) - expected) <= bound * scale).all()


@each_level
@each_format
def test_a_token_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(level, form):
    matrix = pack(pool(level, 2), weights(100, 513), form)
    x = np.random.default_rng(2).normal(size=(max(TOKENS), 513)).astype(np.float32)
    alone = np.concatenate([matrix.matmul(pool(level, 2), row[None]) for row in x])
    for tokens in TOKENS:
        for count in (1, 3):
            assert np.array_equal(matrix.matmul(pool(level, count), x[:tokens]), alone[:tokens])


@each_level
@pytest.mark.parametrize(
    "form",
    [*FLOATS, *(form for form in QUANTIZED if form.group in (16, 32, None) or form.has_factors)],
    ids=lambda form: name_of(form),
)
def test_prompts_have_the_bits_of_short_batches(level, form):
    matrix = pack(pool(level, 2), weights(*WIDE), form)
    x = np.random.default_rng(3).normal(size=(max(PROMPT_TOKENS), WIDE[1])).astype(np.float32)
    few = np.concatenate([matrix.matmul(pool(level, 2), some) for some in np.array_split(x, 40)])
    for tokens in PROMPT_TOKENS:
        for count in (1, 3):
            assert np.array_equal(matrix.matmul(pool(level, count), x[:tokens]), few[:tokens])


@pytest.mark.parametrize("group", [8, 48, 256])
def test_groups_that_the_kernels_lack_are_refused(group):
    with pytest.raises(ValueError, match=f"no groups of {group} columns"):
        MatrixFormat(format=RlFormat.Q4, group=group)


@each_level
@pytest.mark.parametrize("has_min", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [16, 32, 64])
def test_codes_are_packed_as_they_are(level, bits, group, has_min):
    threads, rng = pool(level, 2), np.random.default_rng(bits)
    rows, columns = 21, 192
    codes = rng.integers(0, 1 << bits, size=(rows, columns), dtype=np.uint8)
    scales = rng.normal(size=(rows, columns // group)).astype(np.float16).astype(np.float32)
    mins = rng.normal(size=scales.shape).astype(np.float16).astype(np.float32) if has_min else None
    form = MatrixFormat(format=RlFormat.of_bits(bits), group=group, has_min=has_min)
    matrix = pack_codes(threads, codes, scales, mins, form)
    spread = np.repeat(scales, group, axis=1)
    expected = (
        codes * spread + np.repeat(mins, group, axis=1)
        if has_min
        else (codes.astype(np.float32) - 2 ** (bits - 1)) * spread
    )
    unpacked = matrix.unpack(threads, np.arange(rows, dtype=np.int32))
    assert np.allclose(unpacked, expected, rtol=2e-6, atol=1e-5)
    for tokens in (3, 6):
        x = rng.normal(size=(tokens, columns)).astype(np.float32)
        scale = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(expected, axis=1)
        assert (np.abs(matrix.matmul(threads, x) - x @ expected.T) <= PRODUCT_ERROR * scale).all()


@each_level
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@each_format
def test_what_is_not_a_number_stays_so_in_its_own_row(level, form, odd):
    threads = pool(level, 2)
    matrix = pack(threads, weights(16, 64), form)
    x = np.ones((3, 64), dtype=np.float32)
    x[1, 7] = odd
    out = matrix.matmul(threads, x)
    assert np.isfinite(out[[0, 2]]).all()
    assert not np.isfinite(out[1]).all()


@each_level
def test_weights_of_any_size_keep_their_precision(level):
    threads = pool(level, 2)
    bytes_of_32 = MatrixFormat(format=RlFormat.Q8, group=32)
    with_factors = MatrixFormat(format=RlFormat.Q4, group=128, has_factors=True)
    for size in (1e-30, 1e-9, 1.0, 1e9, 1e20, 1e30):
        weight = weights(16, 128) * np.float32(size)
        for form, bound in ((bytes_of_32, 0.0045), (with_factors, 0.08)):
            unpacked = pack(threads, weight, form).unpack(threads, np.arange(16, dtype=np.int32))
            assert np.abs(unpacked - weight).max() <= bound * float(np.abs(weight).max())


@each_level
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_costs_the_other_groups_nothing(level, odd):
    threads, rows = pool(level, 2), np.arange(32, dtype=np.int32)
    weight = weights(32, 256) * np.float32(1e-9)
    spoilt = weight.copy()
    spoilt[3, 130] = odd
    for form in (form for form in QUANTIZED if form.group in (32, 64, 128)):
        expected = pack(threads, weight, form).unpack(threads, rows)
        unpacked = pack(threads, spoilt, form).unpack(threads, rows)
        own = np.zeros(weight.shape, dtype=bool)
        own[3, 130 // form.group * form.group :][: form.group] = True
        assert np.array_equal(unpacked[~own], expected[~own])
        assert not np.isfinite(unpacked[own]).any()
