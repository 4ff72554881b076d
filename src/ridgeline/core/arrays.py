"""Tensors where torch is not needed: numpy arrays, and the names of their types.

A type goes by its name (``float32``, ``bfloat16``, ``float8_e4m3fn``, …), which numpy, torch and
`core.formats` share. The small floats that numpy lacks are those of ml_dtypes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FLOATS = ("float32", "float16", "bfloat16")
FLOAT8S = ("float8_e4m3fn", "float8_e5m2")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The type of that name."""
    if name == "bfloat16" or name.startswith("float8_"):
        import ml_dtypes

        name = getattr(ml_dtypes, name)
    found: np.dtype[Any] = np.dtype(name)
    return found


def empty(shape: tuple[int, ...], dtype: str) -> Array:
    """An array of that type, uninitialised."""
    return np.empty(shape, dtype=numpy_dtype(dtype))


def cast(values: Array, dtype: str) -> Array:
    """The values in that type, rounded to nearest; themselves where they have it."""
    return values.astype(numpy_dtype(dtype), copy=False)


def is_float(values: Array) -> bool:
    """Whether it holds floating-point numbers, the small ones included."""
    return values.dtype.name in ("float64", *FLOATS, *FLOAT8S)
