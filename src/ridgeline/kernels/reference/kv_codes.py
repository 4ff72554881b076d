"""K and V in 8 and 4 bits, as bytes: the codes of a head, then its scale.

Shapes: d elements of a head. Each head of each token has a float32 scale: value = scale · code.
int4 has two codes in a byte, the first in its low half, each plus 8. Its heads are rotated, that is
multiplied by a Hadamard matrix, which spreads what is large in one element over all (QuaRot, arXiv
2404.00456); `decode` rotates back.
"""

import math

import torch

LARGEST_CODE = {"int8": 127, "int4": 7, "fp8": 448}
SCALE_BYTES = 4


def code_bytes(form: str, width: int) -> int:
    """Of a head of d elements, with its scale; 0 of one without elements."""
    codes = width // 2 if form == "int4" else width
    return codes + SCALE_BYTES if width else 0


def encode(form: str, values: torch.Tensor) -> torch.Tensor:
    """Bytes ``[..., code_bytes]``, uint8, of values ``[..., d]``.

    A value that is not finite makes all that is read of its head not a number.
    """
    values = rotate_heads(values) if form == "int4" else values
    largest = values.abs().amax(-1, keepdim=True).float()
    scales = torch.where(largest.isfinite(), largest / LARGEST_CODE[form], torch.nan)
    scaled = (values / torch.where(scales > 0, scales, 1)).nan_to_num(0.0).float()
    if form == "fp8":
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    elif form == "int8":
        codes = scaled.round().to(torch.int8).view(torch.uint8)
    else:
        halves = (scaled.round() + 8).to(torch.uint8)
        codes = halves[..., ::2] | halves[..., 1::2] << 4
    return torch.cat([codes, scales.contiguous().view(torch.uint8)], dim=-1)


def decode(form: str, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values ``[..., d]`` of what `encode` made."""
    codes = stored[..., :-SCALE_BYTES].contiguous()
    scales = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32).to(dtype)
    if form == "int4":
        halves = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        return rotate_heads((halves.to(dtype) - 8) * scales)
    return codes.view(torch.int8 if form == "int8" else torch.float8_e4m3fn).to(dtype) * scales


def rotate_heads(values: torch.Tensor) -> torch.Tensor:
    """Times the normalised Hadamard matrix, its own inverse; d is a power of two."""
    shape, half = values.shape, 1
    while half < shape[-1]:
        low, high = values.reshape(*shape[:-1], -1, 2, half).unbind(-2)
        values = torch.stack([low + high, low - high], dim=-2).reshape(shape)
        half *= 2
    return values / math.sqrt(shape[-1])
