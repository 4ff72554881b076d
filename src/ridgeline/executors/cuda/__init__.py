"""A GPU: Triton kernels, CUDA graphs of whole decode steps, one step prepared ahead.

See docs/gpu.md. Nothing is imported here: how weights are held on a GPU is priced without Triton.
"""
