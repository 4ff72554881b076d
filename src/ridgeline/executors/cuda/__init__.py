"""A GPU: Triton kernels, CUDA graphs of whole decode steps, one step prepared ahead.

See docs/gpu.md.
"""

from ridgeline.executors.cuda.executor import CUDAExecutor
from ridgeline.executors.cuda.opening import (
    check_fp8,
    check_int4,
    gpu_attention,
    gpu_kernels,
    gpu_tuning,
    open_gpu,
)

__all__ = [
    "CUDAExecutor",
    "check_fp8",
    "check_int4",
    "gpu_attention",
    "gpu_kernels",
    "gpu_tuning",
    "open_gpu",
]
