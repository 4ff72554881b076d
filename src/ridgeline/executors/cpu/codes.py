"""Quantized weights as the codes, scales and minimums that the CPU kernels multiply with."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.kernels.cpu import Format, MatrixFormat
from ridgeline.quant import GGUFBlocks, QuantizedTensor
from ridgeline.quant.gguf_codes import split_blocks

Floats = npt.NDArray[np.float32]

_GROUPS = (128, 64, 32, 16)  # that the kernels have beside whole rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCodes:
    """What `pack_codes` takes: codes ``[rows, columns]``, scales and mins ``[rows, groups]``."""

    codes: npt.NDArray[np.uint8]
    scales: Floats
    mins: Floats | None
    form: MatrixFormat


def matrix_codes(weight: QuantizedTensor | GGUFBlocks) -> Iterator[MatrixCodes | None]:
    """The matrices of a weight, more than one if it is a stack.

    ``None`` stands for what has no such form: codes into a table, floats, columns whose groups are
    not in order (act-order) or not of 16, and scales that are not finite.
    """
    if isinstance(weight, GGUFBlocks):
        yield from _of_blocks(weight)
    elif len(weight.shape) == 2:
        yield _of_tensor(weight)
    else:
        yield from (_of_tensor(weight.entry(index)) for index in range(weight.shape[0]))


def _of_tensor(weight: QuantizedTensor) -> MatrixCodes | None:
    bits = next((bits for bits in (4, 5, 6, 8) if weight.format.bits <= bits), None)
    if weight.table is not None or weight.group_of is not None or bits is None:
        return None
    rows, columns = weight.shape
    block_rows, size = weight.block
    group = None if size >= columns else next((g for g in _GROUPS if size % g == 0), 0)
    if group == 0 or weight.codes.is_floating_point():
        return None
    groups, repeats = (1, 1) if group is None else (-(-columns // group), size // group)
    scales = _by_group(weight.scales, rows, block_rows, repeats)[:, :groups]
    middle, mins = 1 << (bits - 1), None
    if weight.zeros is None:
        codes = (weight.codes.to(torch.int16) + middle).to(torch.uint8)
    else:
        codes = weight.codes
        if bool((weight.zeros != middle).any()):
            mins = -_by_group(weight.zeros, rows, block_rows, repeats)[:, :groups] * scales
    if not _is_finite(scales, mins):
        return None
    form = MatrixFormat(format=Format(bits), group=group, has_min=mins is not None)
    return MatrixCodes(codes=codes.contiguous().numpy(), scales=scales, mins=mins, form=form)


def _by_group(blocks: torch.Tensor, rows: int, block_rows: int, repeats: int) -> Floats:
    """One number for each row and group of columns, from one for each block."""
    values = blocks.float()
    if len(values) != rows:
        values = values.repeat_interleave(block_rows, dim=0)[:rows]
    return values.repeat_interleave(repeats, dim=1).numpy()


def _of_blocks(weight: GGUFBlocks) -> Iterator[MatrixCodes | None]:
    found = split_blocks(weight)
    if found is None or not _is_finite(found.scales, found.mins):
        yield None
        return
    rows, (total, columns) = weight.shape[-2], found.codes.shape
    form = MatrixFormat(
        format=Format(found.bits),
        group=columns // found.scales.shape[1],
        has_min=found.mins is not None,
    )
    for part in (slice(first, first + rows) for first in range(0, total, rows)):
        yield MatrixCodes(
            codes=found.codes[part],
            scales=found.scales[part],
            mins=None if found.mins is None else found.mins[part],
            form=form,
        )


def _is_finite(scales: Floats, mins: Floats | None) -> bool:
    return bool(np.isfinite(scales).all() and (mins is None or np.isfinite(mins).all()))
