"""The kernels of csrc/cpu: loading them, and the layouts that they read."""

from ridgeline.kernels.cpu.library import (
    ABI_VERSION,
    NativeLibraryError,
    available_levels,
    chosen_level,
    load_library,
    native_kernels_run,
    native_level,
)
from ridgeline.kernels.cpu.matrix import (
    TILE_ROWS,
    MatrixFormat,
    PackedMatrix,
    empty_matrix,
    largest_scale,
    matrix_bytes,
    matrix_struct,
    pack,
    pack_codes,
    plain_format,
    put_codes,
    put_rows,
    scale_multiplier,
)
from ridgeline.kernels.cpu.memory import Allocate, Slabs, aligned_bytes
from ridgeline.kernels.cpu.pool import Pool, shared_pool
from ridgeline.kernels.cpu.structs import Format

__all__ = [
    "ABI_VERSION",
    "TILE_ROWS",
    "Allocate",
    "Format",
    "MatrixFormat",
    "NativeLibraryError",
    "PackedMatrix",
    "Pool",
    "Slabs",
    "aligned_bytes",
    "available_levels",
    "chosen_level",
    "empty_matrix",
    "largest_scale",
    "load_library",
    "matrix_bytes",
    "matrix_struct",
    "native_kernels_run",
    "native_level",
    "pack",
    "pack_codes",
    "plain_format",
    "put_codes",
    "put_rows",
    "scale_multiplier",
    "shared_pool",
]
