"""Values into GGUF's blocks: the formats that Ridgeline writes.

There are two doors. `encode` takes values, with or without an importance for each column. An
`Encoder` is for those who choose the codes themselves, such as GPTQ: ``fit`` gives the scales,
``step`` and ``offset`` of which say what a code is worth, and ``pack`` takes any codes in range.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ridgeline.core.errors import UnsupportedModelError
from ridgeline.quant.gguf_blocks import Bytes, Floats
from ridgeline.quant.gguf_formats import GGUF_FORMATS, GGUFFormat
from ridgeline.quant.gguf_pack import PACK, Codes
from ridgeline.quant.gguf_search import (
    Fit,
    fit_offsets,
    fit_one_offset,
    fit_symmetric,
    round_codes,
    symmetric_step,
)

_HALF_LIMIT = 65520  # what rounds to infinity
_UNUSED_IMPORTANCE = 1e-4
_CHUNK_ELEMENTS = 1 << 16  # float32 of this many stay in a core's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """How one format is written.

    Attributes:
        format: its sizes and name.
        group: the elements that share a scale.
        low, high: the range of codes; a value is ``step · code − offset``.
        search: scales of groups ``[K, S, N]`` under weights.
        plain: scales without weights, where the format has a customary choice: blocks are then
            those of ggml.
        weighing: weights of values ``[K, S, N]`` where no importance is given.
    """

    format: GGUFFormat
    group: int
    low: int
    high: int
    search: Callable[[Floats, Floats], Fit]
    plain: Callable[[Floats], tuple[Fit, Floats]] | None = None
    weighing: Callable[[Floats], Floats] | None = None

    def fit(self, values: Floats, weights: Floats | None = None) -> Fit:
        """Scales for blocks of values, ``[N, block_elements]``; ``weights`` are of that shape."""
        x = self._grouped(values)
        return self.search(x, np.ones_like(x) if weights is None else self._grouped(weights))

    def round(self, values: Floats, fit: Fit) -> Codes:
        """The nearest codes ``[N, block_elements]`` of values of that shape."""
        codes = round_codes(self._grouped(values), fit.step, fit.offset, self.low, self.high)
        return self._flat(codes)

    def pack(self, codes: Codes, fit: Fit) -> Bytes:
        """Blocks, uint8 ``[N, block_bytes]``."""
        return PACK[self.format.name](codes, fit)

    def encode(self, values: Floats, importance: Floats | None = None) -> tuple[Bytes, bool]:
        """Blocks of values ``[N, block_elements]``, and whether all their scales are finite.

        ``importance`` is of the shape of the values.
        """
        x = self._grouped(values)
        if importance is None and self.plain is not None:
            fit, codes = self.plain(x)
        else:
            if importance is not None:
                w = self._grouped(importance) * spread(x)
            else:
                w = np.ones_like(x) if self.weighing is None else self.weighing(x)
            fit = self.search(x, w)
            codes = round_codes(x, fit.step, fit.offset, self.low, self.high)
        finite = bool(np.isfinite(fit.d).all())
        if fit.d_min is not None:
            finite = finite and bool(np.isfinite(fit.d_min).all())
        return self.pack(self._flat(codes), fit), finite

    def _grouped(self, values: Floats) -> Floats:
        """``[N, block_elements]`` as ``[K, S, N]``."""
        return np.ascontiguousarray(values.reshape(len(values), -1, self.group).transpose(2, 1, 0))

    def _flat(self, codes: Floats) -> Codes:
        rows = codes.astype(np.int8).transpose(2, 1, 0)
        return np.ascontiguousarray(rows).reshape(codes.shape[2], -1)


def spread(x: Floats) -> Floats:
    """√(σ² + x²), which llama.cpp multiplies importance by; σ² is of the whole super-block."""
    square = x * x
    found: Floats = np.sqrt(square.mean(axis=(0, 1)) + square)
    return found


def _largeness(x: Floats) -> Floats:
    """√σ² + |x|, which llama.cpp weighs by where no importance is known."""
    found: Floats = np.sqrt((x * x).mean(axis=(0, 1))) + np.abs(x)
    return found


def _plain_q4_0(x: Floats) -> tuple[Fit, Floats]:
    """The element of largest magnitude is −8; ``quantize_row_q4_0_ref`` rounds x/d + 8.5 down."""
    index = np.abs(x).argmax(axis=0)
    step = np.take_along_axis(x, index[None], axis=0)[0] / np.float32(-8)
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step != 0)
    codes = np.clip(np.trunc(x.astype(np.float64) * inverse + 8.5), 0, 15).astype(np.float32) - 8
    return Fit(d=step[0].astype(np.float16)), codes


def _plain_q8_0(x: Floats) -> tuple[Fit, Floats]:
    """The largest magnitude is 127; halves are rounded away from zero."""
    step = np.abs(x).max(axis=0) / np.float32(127)
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step != 0)
    ratio = x * inverse
    codes = np.trunc(ratio + np.copysign(np.float32(0.5), ratio))
    return Fit(d=step[0].astype(np.float16)), codes


def _one_scale(low: int, high: int) -> Callable[[Floats, Floats], Fit]:
    return lambda x, w: Fit(d=symmetric_step(x, w, low, high)[0].astype(np.float16))


def _one_offset(high: int) -> Callable[[Floats, Floats], Fit]:
    return lambda x, w: fit_one_offset(x, w, high=high, changes=_wide(16, -0.8, 0.1))


def _wide(count: int, start: float, step: float) -> tuple[float, ...]:
    return tuple(start + step * index for index in range(count))


def _symmetric(low: int, high: int, scales: tuple[int, int]) -> Callable[[Floats, Floats], Fit]:
    return lambda x, w: fit_symmetric(x, w, codes=(low, high), scales=scales)


def _offsets(
    high: int, largest: int, changes: tuple[float, ...]
) -> Callable[[Floats, Floats], Fit]:
    return lambda x, w: fit_offsets(x, w, high=high, largest=largest, changes=changes)


_FORMATS = {fmt.name: fmt for fmt in GGUF_FORMATS.values()}

ENCODERS: Mapping[str, Encoder] = {
    encoder.format.name: encoder
    for encoder in (
        Encoder(
            format=_FORMATS["Q4_0"], group=32, low=-8, high=7,
            search=_one_scale(-8, 7), plain=_plain_q4_0,
        ),
        Encoder(
            format=_FORMATS["Q4_1"], group=32, low=0, high=15, search=_one_offset(15),
        ),
        Encoder(
            format=_FORMATS["Q5_0"], group=32, low=-16, high=15, search=_one_scale(-16, 15),
        ),
        Encoder(
            format=_FORMATS["Q5_1"], group=32, low=0, high=31, search=_one_offset(31),
        ),
        Encoder(
            format=_FORMATS["Q8_0"], group=32, low=-127, high=127,
            search=_one_scale(-127, 127), plain=_plain_q8_0,
        ),
        Encoder(
            format=_FORMATS["Q2_K"], group=16, low=0, high=3,
            search=_offsets(3, 15, _wide(16, -0.5, 0.1)), weighing=_largeness,
        ),
        Encoder(
            format=_FORMATS["Q3_K"], group=16, low=-4, high=3,
            search=_symmetric(-4, 3, (-32, 31)), weighing=_largeness,
        ),
        Encoder(
            format=_FORMATS["Q4_K"], group=32, low=0, high=15,
            search=_offsets(15, 63, _wide(20, -1.0, 0.1)), weighing=_largeness,
        ),
        Encoder(
            format=_FORMATS["Q5_K"], group=32, low=0, high=31,
            search=_offsets(31, 63, _wide(16, -0.5, 0.1)), weighing=_largeness,
        ),
        Encoder(
            format=_FORMATS["Q6_K"], group=16, low=-32, high=31,
            search=_symmetric(-32, 31, (-128, 127)), weighing=_largeness,
        ),
    )
}  # fmt: skip
"""Formats of blocks by name."""


def _bfloat16(values: Floats) -> Bytes:
    """Rounded to nearest even; NaN stays one."""
    bits = values.view(np.uint32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(nan, (bits >> 16) | 64, rounded).astype("<u2").view(np.uint8)


_PLAIN: Mapping[str, Callable[[Floats], Bytes]] = {
    "F32": lambda values: values.astype("<f4").view(np.uint8),
    "F16": lambda values: values.astype("<f2").view(np.uint8),
    "BF16": _bfloat16,
}

WRITABLE = (*_PLAIN, *ENCODERS)
"""The names of the formats that `encode` takes."""


def _floored(importance: Floats) -> Floats:
    """Importance of about 1, and a little for columns that were never used."""
    mean = float(importance.mean(dtype=np.float64))
    relative = importance / mean if mean > 0 else np.ones_like(importance)
    return relative.astype(np.float32) + np.float32(_UNUSED_IMPORTANCE)


def encode(
    name: str, values: Floats, importance: Floats | None = None, *, threads: int | None = None
) -> Bytes:
    """Rows ``[R, C]`` float32 in format ``name``: uint8 ``[R, row_bytes]``.

    ``importance`` ``[C]``, at least 0, weighs the squared error of each column. Memory beside the
    result is a few MiB for each of ``threads`` (default: as many as this process may use). The
    blocks do not depend on the number of threads.

    Raises:
        UnsupportedModelError: a value is not finite, or too large for the format's float16 scale.
    """
    rows = len(values)
    values = np.ascontiguousarray(values, np.float32)
    if name in _PLAIN:
        if not np.isfinite(values).all():
            raise UnsupportedModelError("has values that are not finite")
        if name == "F16" and np.abs(values).max(initial=0) >= _HALF_LIMIT:
            raise UnsupportedModelError("has values beyond 65504")
        return _PLAIN[name](values).reshape(rows, -1)
    encoder = ENCODERS[name]
    elements = encoder.format.block_elements
    blocks = values.reshape(-1, elements)
    out = np.empty((len(blocks), encoder.format.block_bytes), np.uint8)
    weights = None if importance is None else _floored(importance).reshape(-1, elements)
    step = _CHUNK_ELEMENTS // elements

    def work(first: int) -> None:
        some = slice(first, first + step)
        if not np.isfinite(blocks[some]).all():
            raise UnsupportedModelError("has values that are not finite")
        part = None
        if weights is not None:
            part = weights[np.arange(first, min(first + step, len(blocks))) % len(weights)]
        with np.errstate(all="ignore"):  # a float16 scale may underflow, or overflow: checked
            out[some], finite = encoder.encode(blocks[some], part)
        if not finite:
            raise UnsupportedModelError("has values too large for scales in float16")

    starts = range(0, len(blocks), step)
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(work, starts):
            pass
    return out.reshape(rows, -1)
