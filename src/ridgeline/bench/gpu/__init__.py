"""What a GPU does beside what it could: ``make bench-gpu``, or ``python -m ridgeline.bench.gpu``.

Needs this checkout, torch, triton and numpy, and no network.
"""
