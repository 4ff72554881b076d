"""The kernels of csrc/cpu: loading them, and the layouts that they read."""
