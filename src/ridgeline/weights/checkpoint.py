"""A checkpoint folder: one safetensors file, or several with an index, seen as one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from ridgeline.core.arrays import Array
from ridgeline.core.errors import CorruptFileError, ModelNotFoundError
from ridgeline.weights.files import INDEX_NAME, SINGLE_NAME, check_files, files_in
from ridgeline.weights.names import list_some, short_name
from ridgeline.weights.safetensors_file import SafetensorsFile
from ridgeline.weights.shard_index import read_index


class Checkpoint:
    """The tensors of a model folder. Close it, or use it in a ``with`` block; views outlive it.

    Raises:
        ModelNotFoundError: the folder has no weights, or shards that its index names are missing.
        CorruptFileError: a file contradicts its own header, or the index and the shards disagree.
        UnsupportedModelError: the weights are there only in a format that Ridgeline does not read.
        DiskError: a file cannot be read.
    """

    spare: frozenset[str] = frozenset()  # all tensors are somebody's

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: list[SafetensorsFile] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; tensors that were handed out stay valid."""
        for file in self._files:
            file.close()

    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in file order."""
        return tuple(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor ``name``, without reading it."""
        return self._file_of[name].shape(name)

    def num_bytes(self, name: str) -> int:
        """The bytes that tensor ``name`` takes on disk."""
        return self._file_of[name].num_bytes(name)

    def dtype(self, name: str) -> str:
        """The dtype of tensor ``name``; ``UnsupportedModelError`` if Ridgeline cannot read it."""
        return self._file_of[name].dtype(name)

    def tensor(self, name: str) -> Array:
        """Tensor ``name`` as a view of the mapped file; see `SafetensorsFile.tensor`."""
        return self._file_of[name].tensor(name)

    def read_into(
        self,
        name: str,
        out: Array,
        on_bytes: Callable[[int], None] | None = None,
        *,
        first_row: int = 0,
    ) -> None:
        """Read rows of tensor ``name`` into ``out``, converted; see `SafetensorsFile.read_into`."""
        self._file_of[name].read_into(name, out, on_bytes, first_row=first_row)

    def _open(self) -> None:
        present = files_in(self.folder)
        check_files(present, str(self.folder), need_config=False)
        if SINGLE_NAME in present:
            self._add(SINGLE_NAME)
        else:
            self._open_shards(read_index(self.folder / INDEX_NAME), present)

    def _add(self, file_name: str) -> None:
        file = SafetensorsFile(self.folder / file_name)
        self._files.append(file)
        for name in file.names():
            if name in self._file_of:
                raise CorruptFileError(
                    f"Tensor {short_name(name)} is both in {self._file_of[name].path.name} "
                    f"and in {file_name}."
                )
            self._file_of[name] = file

    def _open_shards(self, shard_of: Mapping[str, str], present: frozenset[str]) -> None:
        shards = sorted(set(shard_of.values()))
        missing = [shard for shard in shards if shard not in present]
        if missing:
            raise ModelNotFoundError(
                f"{self.folder} lacks {len(missing)} of the {len(shards)} files that {INDEX_NAME} "
                f"names: {list_some(missing)}."
            )
        for shard in shards:
            self._add(shard)
        absent = [name for name, shard in shard_of.items() if not self._has(name, shard)]
        if absent:
            raise CorruptFileError(
                f"{INDEX_NAME} names tensors that are not in the shards that it gives: "
                f"{list_some(absent)}."
            )

    def _has(self, name: str, shard: str) -> bool:
        file = self._file_of.get(name)
        return file is not None and file.path.name == shard
