"""Typed access to the metadata of a GGUF file, with errors that name the key."""

import math

import numpy as np

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.models.config import show
from ridgeline.weights.gguf.values import Metadata

_MAX_INTEGER = 2**31 - 1


class Keys:
    """The keys of one architecture: ``name`` stands for ``{architecture}.{name}``.

    Getters raise `CorruptFileError` for a value of the wrong type, out of bounds, or absent without
    a default.
    """

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        self._metadata = metadata
        self.architecture = architecture

    def get(self, name: str) -> object:
        """The value as it is, ``None`` if there is none."""
        return self._metadata.get(f"{self.architecture}.{name}")

    def integer(self, name: str, *, default: int | None = None, minimum: int = 1) -> int:
        """A whole number from ``minimum`` to 2³¹ − 1."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray | list):
            raise UnsupportedModelError(
                f"The GGUF file gives {self.architecture}.{name} for each layer, which is not "
                "supported."
            )
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "a whole number")
        if not minimum <= value <= _MAX_INTEGER:
            raise self._wrong(name, value, f"between {minimum} and {_MAX_INTEGER}")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """A finite number; float32 is read as the shortest decimal that it stands for."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        if not math.isfinite(value):
            raise self._wrong(name, value, "finite")
        if abs(value) < 1e38 and float(np.float32(value)) == value:
            return float(str(np.float32(value)))
        return float(value)

    def text(self, name: str, *, default: str) -> str:
        """A string."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def _wrong(self, name: str, value: object, expected: str) -> CorruptFileError:
        told = "absent" if value is None else show(value)
        return CorruptFileError(
            f"The GGUF file must give {self.architecture}.{name} as {expected}, and it is {told}."
        )
