"""Writing a folder of safetensors: headers first, then the rows of any tensor in any order.

The folder has a temporary name until all in it is complete and on the disk.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from ridgeline.weights.files import INDEX_NAME, SINGLE_NAME
from ridgeline.weights.temporary import (
    NewFile,
    publish,
    refuse_existing,
    temporary_name,
    unwritable,
)

_SHARD_BYTES = 5 << 30
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsTensor:
    """A tensor to be written: its name, dtype (F32, F16 or BF16) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """The bytes of one entry of the first axis."""
        return prod(self.shape[1:]) * _ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """The bytes of all elements."""
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


class SafetensorsWriter:
    """Writes a folder with one safetensors file, or several with an index.

    Use it in a ``with`` block: at its end the folder gets its name, if all tensors are whole; an
    exception leaves nothing behind. ``folder`` is where it is until then: other files may be put
    there.

    Raises:
        InvalidRequestError: there is something at ``path`` already.
        DiskError: a file cannot be written, or the disk has no room for it.
    """

    def __init__(
        self, path: Path, tensors: Sequence[SafetensorsTensor], *, shard_bytes: int = _SHARD_BYTES
    ) -> None:
        refuse_existing(path)
        self.path, self.folder = path, temporary_name(path)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._missing = {tensor.name: tensor.num_bytes for tensor in tensors}
        self._place: dict[str, tuple[NewFile, int]] = {}
        self._files: list[NewFile] = []
        try:
            self.folder.mkdir()
            self._begin(tensors, shard_bytes)
        except OSError as error:
            raise unwritable(path, error) from None
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                assert not any(self._missing.values()), self._missing
                while self._files:
                    self._files.pop().close(sync=True)
                publish(self.folder, self.path)
        finally:
            self._discard()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._tensors[name].shape

    def write(self, name: str, first_row: int, values: npt.NDArray[np.uint8]) -> None:
        """Write entries of the first axis of a tensor, as the bytes of its dtype."""
        file, offset = self._place[name]
        data = np.ascontiguousarray(values).reshape(-1)
        self._missing[name] -= data.nbytes
        file.write(data.data, offset + first_row * self._tensors[name].row_bytes)

    def _begin(self, tensors: Sequence[SafetensorsTensor], shard_bytes: int) -> None:
        shards: list[list[SafetensorsTensor]] = [[]]
        size = 0
        for tensor in tensors:
            if size and size + tensor.num_bytes > shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(tensor)
            size += tensor.num_bytes
        count = len(shards)
        names = [
            SINGLE_NAME if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            for number in range(1, count + 1)
        ]
        for name, shard in zip(names, shards, strict=True):
            self._begin_file(name, shard)
        if count > 1:
            weight_map = {
                tensor.name: name
                for name, shard in zip(names, shards, strict=True)
                for tensor in shard
            }
            total = sum(tensor.num_bytes for tensor in tensors)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2))

    def _begin_file(self, name: str, tensors: Sequence[SafetensorsTensor]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset, offsets = 0, []
        for tensor in tensors:
            offsets.append(offset)
            offset += tensor.num_bytes
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": [offsets[-1], offset],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        file = NewFile(self.folder / name, start + offset)
        self._files.append(file)
        file.write(memoryview(len(text).to_bytes(8, "little") + text), 0)
        for tensor, tensor_offset in zip(tensors, offsets, strict=True):
            self._place[tensor.name] = file, start + tensor_offset

    def _discard(self) -> None:
        while self._files:
            self._files.pop().close(sync=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON object as configuration files are.

    Raises:
        DiskError: it cannot be written.
    """
    try:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        raise unwritable(path, error) from None
