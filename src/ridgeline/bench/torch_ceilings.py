"""Ceilings as PyTorch reaches them, for executors that compute with it.

The read rate is that of summing a large array; the arithmetic rate of a number format that of a
large matrix product; ``kernel_bytes_per_s`` that of a matrix-vector product from main memory.
"""

import time
from collections.abc import Callable

import psutil
import torch

from ridgeline.bench.caches import cache_sizes
from ridgeline.bench.conditions import Watch
from ridgeline.core.host import cpu_name
from ridgeline.roofline.ceilings import Ceilings, MemoryLevel

_DRAM_BYTES = 192 << 20
_MATRIX = 768
_FORMATS = ("float32", "bfloat16", "float16", "float64")


def torch_ceilings(formats: tuple[str, ...] = _FORMATS, *, rounds: int = 3) -> Ceilings:
    """Measure; about a second for each format."""
    watch, sizes = Watch(), cache_sizes()
    threads = torch.get_num_threads()
    near = max(1 << 20, min(sizes.l3_bytes // 2, 8 << 20))
    levels = (
        MemoryLevel(
            name="L3", size_bytes=float(sizes.l3_bytes), bytes_per_s=_read_rate(near, rounds)
        ),
        MemoryLevel(
            name="DRAM",
            size_bytes=float(psutil.virtual_memory().total),
            bytes_per_s=_read_rate(_DRAM_BYTES, rounds),
        ),
    )
    return Ceilings(
        name=cpu_name(),
        levels=levels,
        flops_per_s={name: _product_rate(getattr(torch, name), rounds) for name in formats},
        kernel_bytes_per_s={name: _vector_rate(getattr(torch, name), rounds) for name in formats},
        measured=True,
        conditions=watch.conditions(threads=threads),
    )


@torch.inference_mode()
def _read_rate(num_bytes: int, rounds: int) -> float:
    values = torch.ones(num_bytes // 4)
    return num_bytes / _best_s(lambda: values.sum(), rounds)


@torch.inference_mode()
def _product_rate(dtype: torch.dtype, rounds: int) -> float:
    left, right = (torch.ones(_MATRIX, _MATRIX, dtype=dtype) for _ in range(2))
    return 2 * _MATRIX**3 / _best_s(lambda: torch.nn.functional.linear(left, right), rounds)


@torch.inference_mode()
def _vector_rate(dtype: torch.dtype, rounds: int) -> float:
    rows = _DRAM_BYTES // 2 // (2048 * dtype.itemsize)
    matrix, vector = torch.ones(rows, 2048, dtype=dtype), torch.ones(1, 2048, dtype=dtype)
    seconds = _best_s(lambda: torch.nn.functional.linear(vector, matrix), rounds)
    return matrix.nbytes / seconds


def _best_s(act: Callable[[], object], rounds: int, min_s: float = 0.05) -> float:
    """Median over rounds of the fastest call within ``min_s``."""
    act()
    fastest = []
    for _ in range(rounds):
        times: list[float] = []
        while sum(times) < min_s or len(times) < 2:
            start = time.perf_counter()
            act()
            times.append(time.perf_counter() - start)
        fastest.append(min(times))
    return sorted(fastest)[len(fastest) // 2]
