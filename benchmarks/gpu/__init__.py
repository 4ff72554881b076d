"""What a GPU does beside what it could: ``make bench-gpu``, or ``python -m benchmarks.gpu``.

Needs this checkout, torch, triton and numpy, and no network.
"""
