"""Zeros in matrices, and whole channels, heads and layers taken away."""
