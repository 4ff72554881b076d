"""The native library as tests call it: its structs, and a KV cache with shuffled blocks."""

import ctypes as c
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest

from ridgeline.core.rounding import ceil_div
from ridgeline.kernels.cpu.library import available_levels, load_library
from ridgeline.kernels.cpu.pool import Pool
from ridgeline.kernels.cpu.structs import SEQUENCE, RlAttention, RlBatch, RlFormat, RlKVGroup

FORMATS = {
    "f32": RlFormat.F32, "f16": RlFormat.F16, "bf16": RlFormat.BF16,
    "int8": RlFormat.INT8, "int4": RlFormat.INT4, "fp8": RlFormat.FP8,
}  # fmt: skip
LEVELS = available_levels()


@cache
def pool(level: str, num_threads: int) -> Pool:
    return Pool(load_library(level), num_threads)


@dataclass(frozen=True, kw_only=True)
class Part:
    """KV slots ``[start, start + num_tokens)`` of sequence number ``sequence`` of the cache."""

    sequence: int
    start: int
    num_tokens: int
    num_drafts: int = 0
    ancestors: tuple[int, ...] = ()
    sinks: int = 0
    window: int = 0


@dataclass(kw_only=True)
class Cache:
    """A native KV cache of one group, for a few sequences whose blocks lie in random order.

    All memory that nothing was written to is NaN, so that reading it shows.
    """

    level: str
    format: str
    num_kv_heads: int
    k_width: int
    v_width: int
    lengths: Seq[int]
    block_tokens: int = 16
    num_layers: int = 2
    layer: int = 1
    num_threads: int = 2
    seed: int = 0
    group: RlKVGroup = field(init=False)
    tables: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        if self.format == "int4" and not {self.k_width, self.v_width} <= {32, 64, 128, 256}:
            pytest.skip("int4 is of heads whose widths are powers of two")
        self.group = RlKVGroup(
            format=FORMATS[self.format],
            block_tokens=self.block_tokens,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            k_width=self.k_width,
            v_width=self.v_width,
        )
        self._native.rl_kv_group_sizes(c.byref(self.group))
        counts = [ceil_div(length, self.block_tokens) for length in self.lengths]
        self.memory = np.full(sum(counts) * self.group.block_bytes, 255, np.uint8)
        self.group.data = self.memory.ctypes.data
        order = np.random.default_rng(self.seed).permutation(sum(counts)).astype(np.int32)
        self.tables = [np.array(t) for t in np.split(order, np.cumsum(counts)[:-1])]

    @property
    def _native(self) -> c.CDLL:
        return load_library(self.level)

    def write(self, parts: Seq[Part], k_TKd: np.ndarray, v_TKd: np.ndarray) -> None:
        k, v = _floats(k_TKd), _floats(v_TKd)
        with_batch = _Batch(self, parts)
        self._native.rl_kv_write(
            pool(self.level, self.num_threads).handle,
            c.byref(self.group),
            0,
            self.layer,
            c.byref(with_batch.batch),
            _pointer(k),
            _pointer(v),
        )

    def read(self, sequence: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        k = np.empty((count, self.num_kv_heads, self.k_width), np.float32)
        v = np.empty((count, self.num_kv_heads, self.v_width), np.float32)
        self._native.rl_kv_read(
            c.byref(self.group),
            self.layer,
            _pointer(self.tables[sequence]),
            start,
            count,
            _pointer(k),
            _pointer(v),
        )
        return k, v

    def move(self, sequence: int, sources: Seq[int], targets: Seq[int]) -> None:
        sources_, targets_ = np.array(sources, np.int32), np.array(targets, np.int32)
        self._native.rl_kv_move(
            c.byref(self.group),
            _pointer(self.tables[sequence]),
            _pointer(sources_),
            _pointer(targets_),
            len(sources_),
        )

    def attend(
        self,
        parts: Seq[Part],
        q_THd: np.ndarray,
        *,
        scale: float,
        out_width: int = 0,
        softcap: float = 0,
        window: int = 0,
        sinks: np.ndarray | None = None,
        num_threads: int | None = None,
    ) -> np.ndarray:
        q = _floats(q_THd)
        num_heads = q.shape[1]
        threads = num_threads or self.num_threads
        with_batch = _Batch(self, parts)
        sinks = None if sinks is None else _floats(sinks)
        attention = RlAttention(
            num_heads=num_heads,
            out_width=out_width or self.v_width,
            scale=scale,
            softcap=softcap,
            window=window,
            sinks=None if sinks is None else sinks.ctypes.data,
        )
        out = np.full((len(q), num_heads, attention.out_width), np.nan, np.float32)
        size = self._native.rl_attend_scratch_bytes(
            c.byref(self.group), c.byref(attention), c.byref(with_batch.batch), threads
        )
        scratch = np.full(size, 255, np.uint8)
        self._native.rl_attend(
            pool(self.level, threads).handle,
            c.byref(self.group),
            0,
            self.layer,
            c.byref(attention),
            c.byref(with_batch.batch),
            _pointer(q),
            _pointer(out),
            _pointer(scratch),
        )
        return out


class _Batch:
    """A native batch, and the arrays that it points to."""

    def __init__(self, kv: Cache, parts: Seq[Part]) -> None:
        self._kept: list[object] = []
        sequences = np.zeros(len(parts), SEQUENCE)
        self._kept.append(sequences)
        row = 0
        for entry, part in zip(sequences, parts, strict=True):
            tables = np.array([kv.tables[part.sequence].ctypes.data], np.uint64)
            ancestors = np.array(part.ancestors, np.uint64)
            self._kept += [tables, ancestors]
            entry["first_row"], entry["num_tokens"] = row, part.num_tokens
            entry["start"], entry["num_drafts"] = part.start, part.num_drafts
            entry["ancestors"] = ancestors.ctypes.data if part.ancestors else 0
            entry["block_tables"] = tables.ctypes.data
            entry["sinks"], entry["window"] = part.sinks, part.window
            row += part.num_tokens
        self.batch = RlBatch(
            num_tokens=row, num_sequences=len(parts), sequences=sequences.ctypes.data
        )


def _floats(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32)


def _pointer(x: np.ndarray) -> c.c_void_p:
    return c.c_void_p(x.ctypes.data)
