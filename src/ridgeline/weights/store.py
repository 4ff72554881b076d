"""What weights are loaded from: named tensors, however they are stored."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ridgeline.core.arrays import Array


class TensorStore(Protocol):
    """The face that `Checkpoint` and the other kinds of checkpoint have in common."""

    @property
    def folder(self) -> Path:
        """Where the tensors are, for messages."""
        ...

    @property
    def spare(self) -> frozenset[str]:
        """Tensors that may be left over."""
        ...

    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor ``name``, without reading it."""
        ...

    def num_bytes(self, name: str) -> int:
        """The bytes that tensor ``name`` takes on disk."""
        ...

    def dtype(self, name: str) -> str:
        """The dtype of its values; `UnsupportedModelError` if Ridgeline cannot read it."""
        ...

    def read_into(
        self,
        name: str,
        out: Array,
        on_bytes: Callable[[int], None] | None = None,
        *,
        first_row: int = 0,
    ) -> None:
        """Read rows of tensor ``name`` into ``out``; see `SafetensorsFile.read_into`."""
        ...
