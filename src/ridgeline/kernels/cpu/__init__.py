"""The kernels of csrc/cpu: loading them, and the layouts that they read."""

from ridgeline.kernels.cpu.library import (
    ABI_VERSION,
    NativeLibraryError,
    available_levels,
    chosen_level,
    load_library,
    native_kernels_run,
)
from ridgeline.kernels.cpu.matrix import (
    MatrixFormat,
    PackedMatrix,
    aligned_bytes,
    matrix_struct,
    pack,
    pack_codes,
)
from ridgeline.kernels.cpu.pool import Pool, shared_pool
from ridgeline.kernels.cpu.structs import Format

__all__ = [
    "ABI_VERSION",
    "Format",
    "MatrixFormat",
    "NativeLibraryError",
    "PackedMatrix",
    "Pool",
    "aligned_bytes",
    "available_levels",
    "chosen_level",
    "load_library",
    "matrix_struct",
    "native_kernels_run",
    "pack",
    "pack_codes",
    "shared_pool",
]
