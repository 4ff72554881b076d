"""Matrices as the GPU kernels read them.

Shapes: O rows (outputs), I columns (inputs), G columns that share a scale. Experts are a leading
axis. Scales and zero points are stored ``[I / G, O]``, so that a program reads those of its rows as
one line.

=========  ==========================  ============================================
format     codes                       value
=========  ==========================  ============================================
plain      ``[O, I]`` float            itself
int8       ``[O, I]`` int8             code · scale
uint8      ``[O, I]`` uint8            (code − zero) · scale
int4       ``[O, I / 8]`` int32        (code − zero) · scale, zero 8 where there are none
fp8        ``[O, I]`` float8_e4m3fn    code · scale, float32
=========  ==========================  ============================================

A word of int4 holds four pairs of columns, pair i at bits 4 i and 16 + 4 i: both 16-bit floats of a
pair are made at once. A unit is 4 B words and 32 B columns, B up to 4. Pair i of its word B t + b
is columns 8 (B i + b) + 2 t and the next. So a quarter of a unit is columns that lie together, and
thread t of four loads at once what it multiplies, of a tensor core's operand.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod

import torch

from ridgeline.core.arrays import Array, is_float
from ridgeline.kernels.tensors import as_tensor
from ridgeline.kernels.triton.kv_cache import QUANTIZED
from ridgeline.quant import QuantizedTensor

_GROUPS = (128, 64, 32)
_SCALE_SHARES = (0.95, 0.9, 0.85, 0.8, 0.75)  # of the scale that reaches the largest magnitude
_UNITS = (128, 64, 32)  # columns of int4 that are packed together
_SLICE = 1 << 24  # weights that are quantized at a time


class Format(IntEnum):
    """How a matrix is stored."""

    PLAIN = 0
    INT8 = 1
    UINT8 = 2
    INT4 = 3
    FP8 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMatrix:
    """A matrix, or a stack of experts' matrices; the module's docstring says what its tensors are.

    ``group`` is how many columns share a scale, 0 for whole rows (``scales`` is then ``[1, O]``);
    ``unit`` the columns of int4 that are packed together.
    """

    format: Format
    shape: tuple[int, ...]
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    group: int = 0
    unit: int = 0

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / prod(self.shape)

    def to(self, device: torch.device | str) -> "DeviceMatrix":
        def moved(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else part.to(device, non_blocking=True)

        codes = self.codes.to(device, non_blocking=True)
        return replace(self, codes=codes, scales=moved(self.scales), zeros=moved(self.zeros))


def pack_matrix(weight: torch.Tensor | QuantizedTensor) -> DeviceMatrix | None:
    """A float matrix as it is, or a quantized one with its own codes.

    ``None`` where the kernels have no layout: codes into a table, columns that are not in the order
    of their groups, groups of other sizes, codes of other widths.
    """
    if isinstance(weight, torch.Tensor):
        return DeviceMatrix(
            format=Format.PLAIN, shape=tuple(weight.shape), codes=weight.contiguous()
        )
    rows, columns = weight.shape[-2:]
    block_rows, size = weight.block
    if weight.table is not None or weight.group_of is not None:
        return None
    group = 0 if size >= columns else next((g for g in _GROUPS if size % g == 0), -1)
    if group < 0 or (group and columns % group):
        return None

    def spread(parts: Array | None) -> torch.Tensor | None:
        if parts is None:
            return None
        blocks = as_tensor(parts)
        if blocks.shape[-2] != rows:
            blocks = blocks.repeat_interleave(block_rows, dim=-2)[..., :rows, :]
        if group and size != group:
            blocks = blocks.repeat_interleave(size // group, dim=-1)
        count = columns // group if group else 1
        return blocks[..., :count].mT.contiguous()

    scales, zeros = spread(weight.scales), spread(weight.zeros)
    kind = _kind_of(weight)
    if kind is None:
        return None
    if kind is Format.FP8 and scales is not None:
        scales = scales.float()  # as libraries multiply by them
    codes, unit = as_tensor(weight.codes).contiguous(), 0
    if kind is Format.INT4:
        unit = _unit(columns)
        if not unit:
            return None
        if codes.dtype == torch.int8:
            codes = (codes + 8).to(torch.uint8)
        codes = pack_nibbles(codes, unit)
    return DeviceMatrix(
        format=kind,
        shape=weight.shape,
        codes=codes,
        scales=scales,
        zeros=zeros,
        group=group,
        unit=unit,
    )


def quantize_matrix(weight: torch.Tensor, bits: int, group: int | None = None) -> DeviceMatrix:
    """A float matrix rounded to 4 or 8 bits, one float16 scale for ``group`` columns or for a row.

    Symmetric. The largest magnitude has code −127, or −8 in four bits, as in GGUF's Q4_0; in four
    bits the scale is made smaller where that lessens the squared error.

    Raises:
        ValueError: other bits, or columns that are not whole groups (of 32 where there are none).
    """
    columns = weight.shape[-1]
    if bits not in (4, 8) or columns % (group or (_UNITS[-1] if bits == 4 else 1)):
        raise ValueError(f"{list(weight.shape)} cannot be quantized to {bits} bits by {group}")
    unit = _unit(columns) if bits == 4 else 0

    def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = _quantized(rows, bits, group or columns)
        if not unit:
            return codes.to(torch.int8), scales
        return pack_nibbles((codes + 8).to(torch.uint8), unit), scales

    codes, scales = _by_rows(weight, quantized)
    return DeviceMatrix(
        format=Format.INT4 if bits == 4 else Format.INT8,
        shape=tuple(weight.shape),
        codes=codes,
        scales=scales.mT.contiguous(),
        group=group or 0,
        unit=unit,
    )


def fp8_matrix(weight: torch.Tensor) -> DeviceMatrix:
    """A float matrix in float8_e4m3fn, one float32 scale for each row."""
    largest = QUANTIZED[torch.float8_e4m3fn]

    def quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = rows.float()
        scales = values.abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest
        return (values / scales).clamp(-largest, largest).to(torch.float8_e4m3fn), scales

    codes, scales = _by_rows(weight, quantized)
    return DeviceMatrix(
        format=Format.FP8,
        shape=tuple(weight.shape),
        codes=codes,
        scales=scales.mT.contiguous(),
    )


def pack_nibbles(codes: torch.Tensor, unit: int) -> torch.Tensor:
    """uint8 codes below 16 ``[..., I]`` as words ``[..., I / 8]``, ``unit`` columns at a time."""
    # Byte q of half h of a word has pairs 2 q and 2 q + 1.
    pairs = codes.unflatten(-1, (-1, 2, 2, unit // 32, 4, 2))  # [..., q, low or high, b, t, h]
    packed = pairs[..., 0, :, :, :] | pairs[..., 1, :, :, :] << 4
    ordered = packed.movedim(-4, -1).transpose(-4, -3)  # [..., t, b, h, q]
    words: torch.Tensor = ordered.flatten(-5).view(torch.int32)
    return words


def unpack_nibbles(words: torch.Tensor, unit: int) -> torch.Tensor:
    """What `pack_nibbles` has packed."""
    ordered = words.view(torch.uint8).unflatten(-1, (-1, 4, unit // 32, 2, 2))
    packed = ordered.transpose(-4, -3).movedim(-1, -4)
    codes: torch.Tensor = torch.stack((packed & 15, packed >> 4), dim=-4).flatten(-6)
    return codes


def _unit(columns: int) -> int:
    """Columns of int4 that are packed together; 0 if there are no whole units."""
    return next((unit for unit in _UNITS if columns % unit == 0), 0)


def _by_rows(
    weight: torch.Tensor, quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix or of a stack, of some rows after the others: up to 25 bytes of
    each weight that is worked on are there beside the matrix."""
    rows = weight.flatten(0, -2)
    each = max(1, _SLICE // weight.shape[-1])
    codes, scales = (
        part.new_empty(len(rows), part.shape[-1]) for part in quantize(rows[: min(1, len(rows))])
    )
    for first in range(0, len(rows), each):
        part = slice(first, first + each)
        codes[part], scales[part] = quantize(rows[part])
    return codes.unflatten(0, weight.shape[:-1]), scales.unflatten(0, weight.shape[:-1])


def _quantized(rows: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of rows in float32, and their scales ``[O, G]``."""
    parts = rows.float().unflatten(-1, (-1, group))
    largest = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
    least = -8 if bits == 4 else -127
    codes, scales, error = _rounded(parts, largest / least, least)
    for share in _SCALE_SHARES if bits == 4 else ():
        other_codes, other_scales, other_error = _rounded(parts, largest * (share / least), least)
        better = other_error < error
        codes, scales = (
            torch.where(better, other_codes, codes),
            torch.where(better, other_scales, scales),
        )
        error = torch.minimum(error, other_error)
    return codes.flatten(-2), scales[..., 0]


def _rounded(
    parts: torch.Tensor, scales: torch.Tensor, least: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of groups, their scales in float16, and the squared error of each."""
    halves = scales.half()
    halves = torch.where(halves == 0, torch.ones_like(halves), halves)
    codes = (parts / halves.float()).round().clamp(least, -least - (1 if least == -8 else 0))
    error = (codes * halves.float() - parts).square().sum(-1, keepdim=True)
    return codes, halves, error


def _kind_of(weight: QuantizedTensor) -> Format | None:
    kind = weight.codes.dtype.name
    if is_float(weight.codes):
        return Format.FP8 if kind == "float8_e4m3fn" else None
    if weight.format.bits <= 4:
        return Format.INT4 if (kind == "int8") == (weight.zeros is None) else None
    if weight.format.bits > 8:
        return None
    return Format.INT8 if kind == "int8" else Format.UINT8
