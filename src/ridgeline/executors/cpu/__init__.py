"""Plans on our C++ kernels."""
