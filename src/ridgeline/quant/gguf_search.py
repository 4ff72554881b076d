"""The scales with which values become GGUF's codes: least squares over candidates.

Groups lie element-major, ``[K, …]`` float32 with the K elements of a group first, so that every
step is a pass over contiguous memory. ``w`` weighs squared errors. Formats whose groups share a
super-block have their scales quantized too: ``[K, S, N]`` is N super-blocks of S groups.

For fixed codes the error is a quadratic form of a group's scale and offset, so the integers that
stand for them are chosen by its moments, without a pass over the elements; only rounding again to
the new scales is one. ``make_qx_quants``, ``make_qkx3_quants`` and ``make_qp_quants`` of llama.cpp
(``ggml-quants.c``) quantize the scales by themselves instead, and round once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ridgeline.quant.gguf_blocks import Floats

_Array = npt.NDArray[Any] | None
_TINY = np.float32(1e-30)
_RANK = np.float32(1e-6)  # of a determinant: less is rounding
_REFITS = 2
_NEIGHBOURS = (-2, -1, 1, 2)
_SCALE_CHANGES = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0)  # of the largest integer
_STEPS = np.arange(-9, 10, dtype=np.float32) / 10  # of the largest code, around the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Scales of N blocks of S groups: a value is ``step · code − offset``.

    Attributes:
        d: float16 ``[N]``, and ``d_min``, ``None`` without offsets: what the integers multiply.
        scales: ``[S, N]``, ``None`` where a block has one scale, which is ``d``; ``mins`` likewise.
    """

    d: npt.NDArray[np.float16]
    d_min: npt.NDArray[np.float16] | None = None
    scales: npt.NDArray[np.int16] | None = None
    mins: npt.NDArray[np.int16] | None = None

    @property
    def step(self) -> Floats:
        """``[S, N]``."""
        d = self.d.astype(np.float32)[None]
        return d if self.scales is None else d * self.scales.astype(np.float32)

    @property
    def offset(self) -> Floats | None:
        """``[S, N]``."""
        if self.d_min is None:
            return None
        d_min = self.d_min.astype(np.float32)[None]
        return d_min if self.mins is None else d_min * self.mins.astype(np.float32)


def round_codes(x: Floats, step: Floats, offset: Floats | None, low: int, high: int) -> Floats:
    """The nearest codes, as float32 of the shape of ``x``; 0 where the step is 0."""
    inverse = np.divide(1, step, out=np.zeros_like(step), where=np.abs(step) > _TINY)
    codes = x * inverse
    if offset is not None:
        codes += offset * inverse
    np.rint(codes, out=codes)
    np.minimum(codes, np.float32(high), out=codes)
    return np.maximum(codes, np.float32(low), out=codes)


def symmetric_step(x: Floats, w: Floats, low: int, high: int) -> Floats:
    """The step of each group, ``[…]``, without an offset; negative if that fits better."""
    index = np.abs(x).argmax(axis=0)
    largest = np.take_along_axis(x, index[None], axis=0)[0]
    usable = np.abs(largest) > _TINY
    safe = np.where(usable, largest, np.float32(1))
    wx = w * x
    best = np.zeros_like(safe)
    step = np.zeros_like(safe)
    starts = [safe / (np.float32(low) - change) for change in _STEPS]
    for count in range(len(starts) + _REFITS):
        tried = starts[count] if count < len(starts) else step
        codes = round_codes(x, tried, None, low, high)
        xl = _dot(wx, codes)
        ll = _dot(w * codes, codes)
        found = xl / np.maximum(ll, _TINY)
        better = found * xl > best
        best = np.where(better, found * xl, best)
        step = np.where(better, found, step)
    return np.where(usable, step, np.float32(0))


class _Group(NamedTuple):
    """Groups ``[K, …]`` with what is known of them before any codes are."""

    x: Floats
    w: Floats
    wx: Floats
    sum_w: Floats
    sum_x: Floats

    @classmethod
    def of(cls, x: Floats, w: Floats) -> "_Group":
        wx = w * x
        return cls(x, w, wx, w.sum(axis=0), wx.sum(axis=0))

    def moments(self, step: Floats, offset: Floats, high: int) -> "_Moments":
        """Those of the nearest codes."""
        codes = round_codes(self.x, step, offset, 0, high)
        weighted = self.w * codes
        return _Moments(weighted.sum(axis=0), _dot(weighted, codes), _dot(self.wx, codes))


class _Moments(NamedTuple):
    """Σ w·l, Σ w·l² and Σ w·x·l over the codes l of each group."""

    l: Floats  # noqa: E741
    ll: Floats
    xl: Floats

    def best(self, group: _Group) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
        """Step and offset of least error for these codes, and where there are any."""
        determinant = group.sum_w * self.ll - self.l * self.l
        solvable = determinant > _RANK * group.sum_w * self.ll
        divisor: Floats = np.where(solvable, determinant, np.float32(1)).astype(np.float32)
        step: Floats = np.divide(group.sum_w * self.xl - group.sum_x * self.l, divisor)
        offset: Floats = np.divide(self.l * self.xl - self.ll * group.sum_x, divisor)
        return step, offset, solvable

    def gain(self, group: _Group, step: Floats, offset: Floats) -> Floats:
        """How much less the error is than with all values 0."""
        linear = step * self.xl - offset * group.sum_x
        square = step * (step * self.ll - 2 * offset * self.l) + offset * offset * group.sum_w
        return 2 * linear - square


def step_and_offset(group: _Group, high: int, changes: Sequence[float]) -> tuple[Floats, Floats]:
    """Step and offset, both at least 0, of each group, for codes from 0 to ``high``.

    ``changes`` are added to ``high`` for the steps that are tried: the range over this many codes.
    """
    x = group.x
    least = np.minimum(x.min(axis=0), np.float32(0))
    span = x.max(axis=0) - least
    usable = span > _TINY
    span = np.where(usable, span, np.float32(1)).astype(np.float32)
    most = np.full_like(span, -np.inf)
    starts: list[Floats] = [np.divide(span, np.float32(high + change)) for change in changes]
    step: Floats = np.divide(span, np.float32(high))
    offset = -least
    for count in range(len(starts) + _REFITS):
        tried, below = (starts[count], -least) if count < len(starts) else (step, offset)
        moments = group.moments(tried, below, high)
        a, b, solvable = moments.best(group)
        alone = b < 0  # the best offset of the wrong sign: none
        a = np.where(alone, moments.xl / np.maximum(moments.ll, _TINY), a)
        b = np.where(alone, np.float32(0), b)
        gain = a * moments.xl - b * group.sum_x
        better = solvable & (a > 0) & (gain > most)
        most = np.where(better, gain, most)
        step, offset = np.where(better, a, step), np.where(better, b, offset)
    # A constant group is its offset, or one step of its own size where that has the wrong sign.
    constant: Floats = np.divide(np.maximum(x[0], np.float32(0)), np.float32(high))
    step = np.where(usable, step, constant)
    return step, np.where(usable, offset, np.maximum(-x[0], np.float32(0)))


def fit_one_offset(x: Floats, w: Floats, *, high: int, changes: Sequence[float]) -> Fit:
    """The scale and offset of blocks ``[K, 1, N]``, each a float16 of its own."""
    group = _Group.of(x, w)
    step, offset = step_and_offset(group, high, changes)
    d = step.astype(np.float16)
    step = d.astype(np.float32)
    moments = group.moments(step, offset, high)
    offset = np.divide(step * moments.l - group.sum_x, np.maximum(group.sum_w, _TINY))
    return Fit(d=d[0], d_min=offset.astype(np.float16)[0])


def fit_symmetric(x: Floats, w: Floats, *, codes: tuple[int, int], scales: tuple[int, int]) -> Fit:
    """Scales of super-blocks ``[K, S, N]`` without offsets; ``codes`` and ``scales`` are ranges."""
    step = symmetric_step(x, w, *codes)
    wx = w * x
    best, best_gain = None, None
    for _ in range(1 + _REFITS):
        rounded = round_codes(x, step, None, *codes)
        xl, ll = _dot(wx, rounded), _dot(w * rounded, rounded)
        ideal = np.where(ll > _TINY, xl / np.maximum(ll, _TINY), step)
        d, integers = _shared_scale(ideal, ll, *scales)
        fit = Fit(d=d, scales=integers)
        gain = _gain(x, w, wx, fit.step, codes).sum(axis=0)
        best, best_gain = _better(fit, gain, best, best_gain)
        step = best.step
    assert best is not None
    assert best.scales is not None
    # The error is jagged in the scale: the neighbours may be better once codes are rounded again.
    shared = best.d.astype(np.float32)[None]
    chosen, gains = best.scales, _gain(x, w, wx, best.step, codes)
    for change in _NEIGHBOURS:
        tried = np.clip(best.scales + np.int16(change), *scales)
        found = _gain(x, w, wx, shared * tried, codes)
        chosen, gains = np.where(found > gains, tried, chosen), np.maximum(found, gains)
    return replace(best, scales=chosen)


def _gain(x: Floats, w: Floats, wx: Floats, step: Floats, codes: tuple[int, int]) -> Floats:
    """How much less the error of each group is than without it, at the nearest codes."""
    rounded = round_codes(x, step, None, *codes)
    return 2 * step * _dot(wx, rounded) - step * step * _dot(w * rounded, rounded)


def fit_offsets(x: Floats, w: Floats, *, high: int, largest: int, changes: Sequence[float]) -> Fit:
    """Scales and offsets of super-blocks ``[K, S, N]``: integers from 0 to ``largest``."""
    group = _Group.of(x, w)
    step, offset = step_and_offset(group, high, changes)
    best, most = None, None
    for turn in range(1 + _REFITS):
        moments = group.moments(step, offset, high)
        if turn:  # what each group alone would have for the codes that it has now
            ideal, _, solvable = moments.best(group)
            step = np.where(solvable, np.maximum(ideal, 0), step)
        fit = _quantized_scales(group, moments, step, largest)
        step, offset = fit.step, _offset(fit)
        gain = group.moments(step, offset, high).gain(group, step, offset).sum(axis=0)
        best, most = _better(fit, gain, best, most)
        step, offset = best.step, _offset(best)
    assert best is not None
    return best


def _quantized_scales(group: _Group, moments: _Moments, step: Floats, largest: int) -> Fit:
    """Integers for steps, for the offsets that are best with those, and once more for steps."""
    d, scales = _shared_scale(step, moments.ll, 0, largest)
    shared = d.astype(np.float32)
    step = shared[None] * scales
    wanted = (step * moments.l - group.sum_x) / np.maximum(group.sum_w, _TINY)
    d_min, mins = _shared_scale(np.maximum(wanted, 0), group.sum_w, 0, largest)
    offset = d_min.astype(np.float32)[None] * mins
    ideal = (moments.xl + offset * moments.l) / np.maximum(moments.ll, _TINY)
    scales = _integers(np.where(moments.ll > _TINY, ideal, step), shared, 0, largest)
    return Fit(d=d, d_min=d_min, scales=scales, mins=mins)


def _offset(fit: Fit) -> Floats:
    assert fit.offset is not None
    return fit.offset


def _shared_scale(
    ideal: Floats, weight: Floats, low: int, high: int
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int16]]:
    """d ``[N]`` and integers ``[S, N]`` with the least Σ weight · (ideal − d · integer)²."""
    index = np.abs(ideal).argmax(axis=0)
    largest = np.take_along_axis(ideal, index[None], axis=0)[0]
    end = low if low < 0 else high
    best = np.full_like(largest, np.inf)
    d = np.zeros(largest.shape, np.float16)
    integers = np.zeros(ideal.shape, np.int16)
    for change in _SCALE_CHANGES:
        tried = largest / np.float32(end + (change if end > 0 else -change))
        for _ in range(2):
            found = _integers(ideal, tried, low, high)
            values = found.astype(np.float32)
            ll = (weight * values * values).sum(axis=0)
            fitted = (weight * values * ideal).sum(axis=0) / np.maximum(ll, _TINY)
            tried = np.where(ll > _TINY, fitted, tried)
        half = tried.astype(np.float16)
        found = _integers(ideal, half.astype(np.float32), low, high)
        error = (weight * (ideal - half.astype(np.float32) * found) ** 2).sum(axis=0)
        better = error < best
        best = np.where(better, error, best)
        d = np.where(better, half, d)
        integers = np.where(better, found, integers)
    return d, integers


def _integers(ideal: Floats, d: Floats, low: int, high: int) -> npt.NDArray[np.int16]:
    return round_codes(ideal, d, None, low, high).astype(np.int16)


def _dot(a: Floats, b: Floats) -> Floats:
    """Σ over the first axis."""
    found: Floats = np.einsum("k...,k...->...", a, b)
    return found


def _better(
    fit: Fit, gain: Floats, best: Fit | None, best_gain: Floats | None
) -> tuple[Fit, Floats]:
    """Of two fits the one of more gain, super-block by super-block."""
    if best is None or best_gain is None:
        return fit, gain
    take = gain > best_gain

    def merged(new: _Array, old: _Array) -> _Array:
        return None if new is None or old is None else np.where(take, new, old)

    chosen = Fit(
        d=np.where(take, fit.d, best.d),
        d_min=merged(fit.d_min, best.d_min),
        scales=merged(fit.scales, best.scales),
        mins=merged(fit.mins, best.mins),
    )
    return chosen, np.where(take, gain, best_gain)
