"""GGUF's formats against the ``gguf`` package, bit for bit."""

import gguf
import numpy as np
import pytest

from ridgeline.quant.gguf_formats import GGUF_FORMATS

READ = {number: fmt for number, fmt in GGUF_FORMATS.items() if fmt.expand is not None}
# Offsets of the float16 scales in a block.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
# Zeros, denormals, the smallest normal number, one, the largest, infinities, NaN.
EDGES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00,
         0x7E00, 0xFE01, 0x7D00)  # fmt: skip


def expected(data: np.ndarray, number: int) -> np.ndarray:
    kind = gguf.GGMLQuantizationType(number)
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(data.reshape(1, -1), kind)
    return np.ascontiguousarray(values, dtype=np.float32).reshape(-1)


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)


@pytest.mark.parametrize("number", READ, ids=lambda number: READ[number].name)
def test_random_and_extreme_blocks(number: int) -> None:
    fmt = READ[number]
    rng = np.random.default_rng(number)
    blocks = rng.integers(0, 256, size=(4096, fmt.block_bytes), dtype=np.uint8)
    blocks[0], blocks[1] = 0, 255
    for index, edge in enumerate(EDGES):
        for offset in SCALES.get(fmt.name, ()):
            blocks[2 + index :: 97, offset : offset + 2] = np.array([edge], "<u2").view(np.uint8)
    found = fmt.dequantize(blocks.reshape(-1))
    assert found.dtype == np.float32
    assert np.array_equal(bits(found), bits(expected(blocks.reshape(-1), number)))


@pytest.mark.parametrize("number", GGUF_FORMATS, ids=lambda number: GGUF_FORMATS[number].name)
def test_sizes_are_the_packages(number: int) -> None:
    fmt, kind = GGUF_FORMATS[number], gguf.GGMLQuantizationType(number)
    assert (fmt.block_elements, fmt.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert fmt.name == kind.name


def test_no_format_of_the_package_is_unknown() -> None:
    assert {int(kind) for kind in gguf.GGML_QUANT_SIZES} == set(GGUF_FORMATS)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_what_the_package_quantized(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    data = gguf.quants.quantize(values, kind).view(np.uint8)
    found = GGUF_FORMATS[int(kind)].dequantize(data.reshape(-1)).reshape(values.shape)
    assert np.abs(found - values).max() < {"Q4": 0.5, "Q5": 0.25}.get(name[:2], 0.03)
