"""Integer division that rounds up."""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Integer = TypeVar("Integer", int, "npt.NDArray[np.int64]")


def ceil_div(count: Integer, size: int) -> Integer:
    """How many blocks of ``size`` hold ``count``."""
    return -(-count // size)


def round_up(count: Integer, multiple: int) -> Integer:
    """The least multiple of ``multiple`` that is not below ``count``."""
    return ceil_div(count, multiple) * multiple
