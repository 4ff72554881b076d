"""What writers of model files share: headers first, then the rows of any tensor in any order."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from ridgeline.weights.temporary import NewFile


class WrittenTensor(Protocol):
    """A tensor to be written."""

    @property
    def name(self) -> str: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


T = TypeVar("T", bound=WrittenTensor)


class RowsWriter(ABC, Generic[T]):
    """Files of tensors that are created at their full size, and get their names when all is there.

    Use it in a ``with`` block: at its end the files get their names, if all tensors are whole; an
    exception leaves nothing behind.
    """

    def __init__(self, tensors: Sequence[T]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._missing = {tensor.name: tensor.num_bytes for tensor in tensors}
        self._place: dict[str, tuple[NewFile, int]] = {}
        self._files: list[NewFile] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                assert not any(self._missing.values()), self._missing
                for file in self._files:
                    file.finish()
                self._publish()
        finally:
            self._discard()

    def write(self, name: str, first_row: int, rows: npt.NDArray[np.uint8]) -> None:
        """Write rows of a tensor, as the bytes of its format."""
        file, offset = self._place[name]
        data = np.ascontiguousarray(rows).reshape(-1)
        assert data.nbytes % self._tensors[name].row_bytes == 0, name
        self._missing[name] -= data.nbytes
        file.write(data.data, offset + first_row * self._tensors[name].row_bytes)

    def _begin(
        self, path: Path, header: bytes | bytearray, offsets: Mapping[str, int], size: int
    ) -> None:
        """Create a file with its header, before ``size`` bytes with tensors at some offsets."""
        file = NewFile(path, len(header) + size)
        self._files.append(file)
        file.write(memoryview(header), 0)
        for name, offset in offsets.items():
            self._place[name] = file, len(header) + offset

    @abstractmethod
    def _publish(self) -> None:
        """Give the finished files their names."""

    def _discard(self) -> None:
        """Remove what has a temporary name still."""
        for file in self._files:
            file.discard()


def split_by_size(tensors: Sequence[T], max_bytes: int | None) -> list[list[T]]:
    """Tensors in order, a new list where the next one would be too much."""
    parts: list[list[T]] = [[]]
    size = 0
    for tensor in tensors:
        if max_bytes is not None and size and size + tensor.num_bytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.num_bytes
    return parts
