"""A GPU: Triton kernels, CUDA graphs of whole decode steps, one step prepared ahead.

See docs/gpu.md.
"""

from ridgeline.executors.cuda.executor import CUDAExecutor

__all__ = ["CUDAExecutor"]
