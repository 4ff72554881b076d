"""Importance matrices: how large the inputs of each column of each matrix are.

llama.cpp's format is a GGUF file with, for each matrix, ``NAME.in_sum2`` (the sum of squares of
each input, ``[experts, columns]``) and ``NAME.counts`` (over how many tokens, ``[experts, 1]``).
Before that it was a binary file (``imatrix.dat``), whose values are means times a number of calls.
Sources: ``tools/imatrix/imatrix.cpp`` and ``common/imatrix-loader.cpp`` of llama.cpp.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import CorruptFileError, InvalidRequestError
from ridgeline.quant.gguf_encoders import encode
from ridgeline.quant.gguf_formats import GGUF_FORMATS
from ridgeline.weights.gguf.file import GGUFFile
from ridgeline.weights.gguf.writer import GGUFTensor, GGUFWriter
from ridgeline.weights.names import list_some, short_name
from ridgeline.weights.reading import open_file, read_exactly

_Floats = npt.NDArray[np.float32]
_SUMS, _COUNTS = ".in_sum2", ".counts"
_CHUNK_COUNT, _CHUNK_SIZE = "imatrix.chunk_count", "imatrix.chunk_size"
_DATASETS = "imatrix.datasets"
_F32 = GGUF_FORMATS[0]
_MAX_LEGACY_BYTES = 1 << 30
_MAX_NAME_BYTES = 1024
_ROUTER = "ffn_gate_inp"  # which stays as it is


class Matrices(Protocol):
    """The tensors that importance is for."""

    def names(self) -> tuple[str, ...]:
        """Their names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """The mean square of every input of every matrix.

    Attributes:
        sums: of squares, float32 ``[E, columns]`` by the name of the GGUF tensor; E is 1, or the
            number of matrices in a stack (in old files one after the other in one row).
        counts: how many tokens each has seen, float32 ``[E]`` or ``[1]``.
        chunks: how many texts of ``chunk_tokens`` tokens were read, 0 if that is not known.
        datasets: where the texts were from.
        source: the name of the file.
    """

    sums: Mapping[str, _Floats]
    counts: Mapping[str, _Floats]
    chunks: int = 0
    chunk_tokens: int = 0
    datasets: Sequence[str] = ()
    source: str = ""

    def of(self, name: str, columns: int, index: int | None = None) -> _Floats | None:
        """The importance of each column of a matrix, ``[columns]``; ``index`` is its expert.

        ``None`` if there is nothing about the matrix. As in llama.cpp an expert that no token went
        to has ones.
        """
        if name not in self.sums:
            return None
        sums, counts = self.sums[name].reshape(-1, columns), self.counts[name]
        expert = 0 if index is None or len(sums) == 1 else index
        count = counts[min(expert, len(counts) - 1)]
        found: _Floats = np.ones_like(sums[expert]) if count <= 0 else sums[expert] / count
        return found

    def metadata(self) -> dict[str, object]:
        """What the file of a model says of the importance that it was made with."""
        return {
            "quantize.imatrix.file": self.source,
            "quantize.imatrix.entries_count": len(self.sums),
            **({"quantize.imatrix.dataset": self.datasets[0]} if self.datasets else {}),
            **({"quantize.imatrix.chunks_count": self.chunks} if self.chunks else {}),
        }

    def check(self, model: Matrices) -> None:
        """Refuse figures of another model.

        Raises:
            InvalidRequestError: a matrix of ``model`` has none, or another number of columns.
        """
        matrices = {
            name: model.shape(name)
            for name in model.names()
            if name.startswith("blk.") and name.endswith(".weight") and len(model.shape(name)) > 1
        }
        missing = [name for name in matrices if name not in self.sums and _ROUTER not in name]
        wrong = [
            name
            for name, shape in matrices.items()
            if name in self.sums
            and self.sums[name].size not in (shape[-1], shape[-1] * _depth(shape))
        ]
        if missing or wrong:
            what = "has nothing about" if missing else "has another number of columns for"
            raise InvalidRequestError(
                f"The importance matrix {short_name(self.source)} {what} "
                f"{list_some(missing or wrong)}: it is of another model."
            )

    def save(self, path: Path) -> None:
        """Write llama.cpp's format.

        Raises:
            InvalidRequestError, DiskError: as `GGUFWriter`.
        """
        metadata = {
            "general.type": "imatrix",
            _DATASETS: list(self.datasets),
            _CHUNK_COUNT: self.chunks,
            _CHUNK_SIZE: self.chunk_tokens,
        }
        parts = {f"{name}{_SUMS}": self.sums[name] for name in sorted(self.sums)}
        parts |= {f"{name}{_COUNTS}": self.counts[name][:, None] for name in sorted(self.sums)}
        tensors = [GGUFTensor(name=n, format=_F32, shape=v.shape) for n, v in parts.items()]
        with GGUFWriter(path, metadata, tensors) as writer:
            for name, values in parts.items():
                writer.write(name, 0, encode("F32", values))


def _depth(shape: tuple[int, ...]) -> int:
    """How many matrices a stack has."""
    return shape[0] if len(shape) > 2 else 1


def read_imatrix(path: Path) -> Importance:
    """The importance matrix in a file, in either format of llama.cpp.

    Raises:
        ModelNotFoundError, CorruptFileError, DiskError: the file is missing or damaged.
    """
    file, size = open_file(path)
    with file:
        start = file.read(4)
        if start != b"GGUF":
            if size > _MAX_LEGACY_BYTES:
                raise CorruptFileError(f"{path.name} is no importance matrix.")
            data = bytearray(size)
            read_exactly(file, path, 0, memoryview(data))
            return _checked(_read_legacy(bytes(data), path.name), path.name)
    with GGUFFile(path) as gguf:
        names = [name.removesuffix(_SUMS) for name in gguf.tensors if name.endswith(_SUMS)]
        if any(f"{name}{_COUNTS}" not in gguf.tensors for name in names) or not names:
            raise CorruptFileError(f"{path.name} is a GGUF file without an importance matrix.")
        parts = {name: _values(gguf, name) for name in gguf.tensors}
        datasets = gguf.metadata.get(_DATASETS, [])
        return _checked(
            Importance(
                sums={name: parts[f"{name}{_SUMS}"] for name in names},
                counts={name: parts[f"{name}{_COUNTS}"].reshape(-1) for name in names},
                chunks=_number(gguf.metadata.get(_CHUNK_COUNT)),
                chunk_tokens=_number(gguf.metadata.get(_CHUNK_SIZE)),
                datasets=tuple(map(str, datasets)) if isinstance(datasets, list) else (),
                source=path.name,
            ),
            path.name,
        )


def _values(gguf: GGUFFile, name: str) -> _Floats:
    blocks = gguf.blocks(name)
    values = blocks.format.dequantize(blocks.data.reshape(-1))
    return values.reshape(-1, blocks.shape[-1])


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _read_legacy(data: bytes, name: str) -> Importance:
    """``imatrix.dat``: entries of name, number of calls, and values that are calls times means."""
    sums: dict[str, _Floats] = {}
    counts: dict[str, _Floats] = {}
    at = 0

    def integer() -> int:
        nonlocal at
        (value,) = struct.unpack_from("<i", data, at)
        at += 4
        return int(value)

    def text(limit: int) -> str:
        nonlocal at
        length = integer()
        if not 0 <= length <= limit or at + length > len(data):
            raise struct.error
        found = data[at : at + length].decode("utf-8", "replace")
        at += length
        return found

    try:
        for _ in range(integer()):
            entry, calls, length = text(_MAX_NAME_BYTES), integer(), integer()
            if length < 1 or at + 4 * length > len(data):
                raise struct.error
            sums[entry] = np.frombuffer(data, "<f4", length, at)[None]
            counts[entry] = np.array([max(calls, 1)], np.float32)
            at += 4 * length
        chunks = integer() if at + 4 <= len(data) else 0
        datasets = (text(len(data)),) if at + 4 <= len(data) else ()
    except struct.error:
        raise CorruptFileError(f"{name} is no importance matrix, or a damaged one.") from None
    if not sums:
        raise CorruptFileError(f"{name} is an importance matrix without entries.")
    return Importance(sums=sums, counts=counts, chunks=chunks, datasets=datasets, source=name)


def _checked(found: Importance, name: str) -> Importance:
    for entry, sums in found.sums.items():
        counts = found.counts[entry]
        good = np.isfinite(sums).all() and (sums >= 0).all() and np.isfinite(counts).all()
        if not good or len(counts) not in (1, len(sums)):
            raise CorruptFileError(
                f"{name} has values for {short_name(entry)} that are not sums of squares."
            )
    return found
