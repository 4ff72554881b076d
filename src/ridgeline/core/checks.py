"""Checks of single values, of requests and of settings."""

import sys
from typing import TypeGuard

from ridgeline.core.errors import InvalidRequestError, RidgelineError


def check_int(
    name: str,
    value: object,
    low: int,
    high: int,
    *,
    optional: bool = False,
    error: type[RidgelineError] = InvalidRequestError,
) -> None:
    """Raise ``error`` unless ``value`` is a whole number within the bounds."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(f"{name} must be a whole number.")
    if not low <= value <= high:
        raise error(f"{name} must be between {low} and {high}.")


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value is a number that a float can hold; integers may be of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def check_float(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    error: type[RidgelineError] = InvalidRequestError,
) -> None:
    """Raise ``error`` unless ``value`` is a finite number within the bounds."""
    if not is_finite(value):
        raise error(f"{name} must be a finite number.")
    if not low <= value <= high or (low_open and value == low):
        bound = "greater than" if low_open else "at least"
        raise error(f"{name} must be {bound} {low:g} and at most {high:g}.")
