"""Bytes of quantized formats against the gguf package's own table of block sizes."""

import gguf
import pytest

from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import number_format

_GGUF = {
    "q4_0": "Q4_0",
    "q8_0": "Q8_0",
    "q4_k": "Q4_K",
    "q5_k": "Q5_K",
    "q6_k": "Q6_K",
    "ternary": "TQ1_0",
    "mxfp4": "MXFP4",
    "float16": "F16",
}


@pytest.mark.parametrize(("name", "kind"), _GGUF.items())
def test_blocks(name, kind):
    shape = (96, 1024)
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert number_format(name).num_bytes(shape) == 96 * 1024 / elements * size


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("int4", 4.5),
        ("int3", 3.5),
        ("int2", 2.5),
        ("int4-g128", 4.125),
        ("int8", 8 + 16 / 4096),
        ("nf4", 4.127),
        ("bf16", 16),
    ],
)
def test_bits_include_scales(name, bits):
    assert number_format(name).bits_per_element(4096) == pytest.approx(bits, abs=1e-3)


def test_an_unknown_format_names_the_known_ones():
    with pytest.raises(SettingsError, match="int4"):
        number_format("int5")
