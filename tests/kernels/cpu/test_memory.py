"""Memory of matrices: each from a cache line on, none of it anybody else's."""

import numpy as np

from ridgeline.kernels.cpu.memory import Slabs


def test_slabs_hold_each_matrix_apart() -> None:
    slabs, rng = Slabs(), np.random.default_rng(0)
    sizes = [1, 64, *map(int, rng.integers(1, 3 << 20, 12)), 9 << 20, 5]
    found = [slabs.allocate(size) for size in sizes]
    for number, memory in enumerate(found):
        assert memory.ctypes.data % 64 == 0
        memory[:] = number
    for number, (memory, size) in enumerate(zip(found, sizes, strict=True)):
        assert memory.shape == (size,)
        assert (memory == number).all()
