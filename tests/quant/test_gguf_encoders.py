"""What we write in GGUF's formats: the package's values, its blocks, and errors that are small."""

import gguf
import numpy as np
import pytest

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.quant.gguf_codes import GGUFLayout, code_layout
from ridgeline.quant.gguf_encoders import ENCODERS, WRITABLE, encode
from ridgeline.quant.gguf_formats import GGUF_FORMATS
from ridgeline.quant.gguf_tensor import GGUFBlocks

FORMATS = {fmt.name: fmt for fmt in GGUF_FORMATS.values()}
BLOCKS = sorted(ENCODERS)
# Root of the mean square error over that of the values, of the values below, that llama.cpp's own
# encoders leave (ggml_quantize_chunk of llama-cpp-python 0.3.36, without importance).
LLAMA_CPP = {
    "Q4_0": 0.08630, "Q4_1": 0.07841, "Q5_0": 0.04293, "Q5_1": 0.03797, "Q8_0": 0.00538,
    "Q2_K": 0.29748, "Q3_K": 0.15117, "Q4_K": 0.07171, "Q5_K": 0.03621, "Q6_K": 0.01783,
}  # fmt: skip


def weights(rows: int = 32, columns: int = 512, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, columns)) * 0.02).astype(np.float32)


def values_of(name: str, blocks: np.ndarray) -> np.ndarray:
    return FORMATS[name].dequantize(blocks.reshape(-1)).reshape(len(blocks), -1)


def error(values: np.ndarray, found: np.ndarray, weight: np.ndarray | float = 1.0) -> float:
    return float(np.sqrt((weight * (found - values) ** 2).sum() / (weight * values**2).sum()))


@pytest.mark.parametrize("name", WRITABLE)
def test_the_package_reads_our_blocks_as_we_do(name: str) -> None:
    x = weights()
    blocks = encode(name, x)
    kind = gguf.GGMLQuantizationType[name]
    data = blocks if name in BLOCKS or name == "BF16" else blocks.view(FLOATS[name])
    theirs = gguf.quants.dequantize(data, kind)
    assert np.array_equal(values_of(name, blocks), theirs)


FLOATS = {"F32": np.float32, "F16": np.float16}


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q8_0"])
def test_blocks_are_those_of_the_package(name: str) -> None:
    x = weights(rows=256)
    x[0], x[1, :32] = 0, np.linspace(-1, 1, 32)
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name])
    assert np.array_equal(encode(name, x), np.ascontiguousarray(theirs).view(np.uint8))


@pytest.mark.parametrize("name", BLOCKS)
def test_errors_are_no_larger_than_those_of_llama_cpp(name: str) -> None:
    x = weights(rows=256, seed=1)
    assert error(x, values_of(name, encode(name, x))) <= LLAMA_CPP[name]


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "Q8_0"])
def test_importance_moves_the_error_to_where_it_counts_less(name: str) -> None:
    x = weights()
    importance = np.random.default_rng(2).gamma(0.5, size=512).astype(np.float32)
    plain = error(x, values_of(name, encode(name, x)), importance)
    weighed = error(x, values_of(name, encode(name, x, importance)), importance)
    assert weighed < 0.97 * plain


@pytest.mark.parametrize("name", BLOCKS)
def test_importance_is_a_ratio_and_unused_columns_are_rounded_like_others(name: str) -> None:
    x = weights()
    importance = np.ones(512, np.float32)
    assert np.array_equal(encode(name, x, importance), encode(name, x, 1e-12 * importance))
    importance[:256] = 0
    found = values_of(name, encode(name, x, importance))
    assert error(x[:, :256], found[:, :256]) < 1.3 * LLAMA_CPP[name]
    nothing, ones = np.zeros(512, np.float32), np.ones(512, np.float32)
    assert np.array_equal(encode(name, x, nothing), encode(name, x, ones))


@pytest.mark.parametrize("name", BLOCKS)
def test_awkward_rows(name: str) -> None:
    """Zeros, constants of either sign, one large value, the smallest numbers, a single sign."""
    x = np.zeros((8, 512), np.float32)
    x[1], x[2], x[3, 5] = 0.125, -0.125, 3.0
    x[4] = 1e-30
    x[5], x[6] = np.abs(weights(1)), -np.abs(weights(1))
    for importance in (None, np.ones(512, np.float32)):
        found = values_of(name, encode(name, x, importance))
        assert np.isfinite(found).all()
        assert not found[0].any()
        assert np.abs(found[4]).max() <= 1e-7
        for row, allowed in ((1, 0.02), (2, 0.02), (3, 0.02)):
            assert error(x[row], found[row]) < allowed, row
        for row in (5, 6):
            assert error(x[row], found[row]) < 1.5 * LLAMA_CPP[name], row


@pytest.mark.parametrize("name", WRITABLE)
def test_what_is_not_finite_is_refused(name: str) -> None:
    for value in (np.nan, np.inf):
        x = weights()
        x[3, 7] = value
        with pytest.raises(UnsupportedModelError, match="not finite"):
            encode(name, x)


def test_values_beyond_float16_are_refused() -> None:
    x = weights()
    x[0, 0] = 1e8
    with pytest.raises(UnsupportedModelError, match="too large"):
        encode("Q8_0", x)
    with pytest.raises(UnsupportedModelError, match="65504"):
        encode("F16", x)


@pytest.mark.parametrize("name", BLOCKS)
def test_threads_do_not_change_the_blocks(name: str) -> None:
    x = weights(rows=300)
    assert np.array_equal(encode(name, x, threads=1), encode(name, x, threads=4))


@pytest.mark.parametrize("name", BLOCKS)
def test_codes_and_scales_of_ones_own_are_packed_as_they_are(name: str) -> None:
    encoder, fmt = ENCODERS[name], FORMATS[name]
    x = weights().reshape(-1, fmt.block_elements)
    fit = encoder.fit(x)
    rng = np.random.default_rng(3)
    codes = rng.integers(encoder.low, encoder.high + 1, size=x.shape).astype(np.int8)
    blocks = encoder.pack(codes, fit)
    groups = codes.reshape(len(x), -1, encoder.group)
    expected = fit.step.T[:, :, None] * groups.astype(np.float32)
    if fit.offset is not None:
        expected = expected - fit.offset.T[:, :, None]
    assert np.array_equal(fmt.dequantize(blocks.reshape(-1)), expected.reshape(-1))
    layout = code_layout(GGUFBlocks(format=fmt, shape=blocks.shape, data=blocks))
    assert isinstance(layout, GGUFLayout)
    # Layouts count from 0, those of fewer than four bits in four.
    middle = 1 << (layout.bits - 1) if encoder.low < 0 else 0
    assert np.array_equal(layout.codes(blocks).astype(int) - middle, codes)


@pytest.mark.parametrize("name", BLOCKS)
def test_rounding_again_to_the_scales_found_gives_the_same_blocks(name: str) -> None:
    encoder = ENCODERS[name]
    x = weights().reshape(-1, encoder.format.block_elements)
    fit = encoder.fit(x)
    values = FORMATS[name].dequantize(encoder.pack(encoder.round(x, fit), fit).reshape(-1))
    again = encoder.pack(encoder.round(values.reshape(x.shape), fit), fit)
    assert np.array_equal(FORMATS[name].dequantize(again.reshape(-1)), values)
