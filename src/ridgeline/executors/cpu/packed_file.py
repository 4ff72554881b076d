"""One file of packed weights, laid out so that it can be mapped and multiplied with as it is.

========  =====================================================================================
bytes     meaning
========  =====================================================================================
0-7       ``RLPACKED``
8-15      length of the header, little-endian
16-47     SHA-256 of the header
48-       the header, JSON: `_Header`
...       data of each tensor, at multiples of 4,096 bytes, and 4,096 bytes after the last
========  =====================================================================================

A file is written under another name and renamed, so that it is whole or not there; what happens to
it later is found by its length, the header's digest and a digest of a sample of each tensor.
"""

import hashlib
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from ridgeline.core.errors import CorruptFileError
from ridgeline.core.rounding import round_up
from ridgeline.executors.cpu.weights import PackedWeights
from ridgeline.kernels.cpu.library import ABI_VERSION
from ridgeline.kernels.cpu.matrix import PackedMatrix
from ridgeline.kernels.cpu.structs import RlMatrix

_MAGIC = b"RLPACKED"
_START_BYTES = len(_MAGIC) + 8 + 32
_PAGE_BYTES = 4096
_MAX_HEADER_BYTES = 1 << 28
_SAMPLED_PAGES = 16  # of each tensor; a smaller one is digested whole

Bytes = npt.NDArray[np.uint8]


_Fields = tuple[int, int, int, int, int, int, float]


class _Tensor(msgspec.Struct, frozen=True):
    """``shape`` is that of a vector's array; a matrix has the fields of its struct."""

    name: str
    offset: int
    num_bytes: int
    digest: str
    shape: tuple[int, ...] = ()
    matrix: _Fields | None = None


class _Header(msgspec.Struct, frozen=True):
    abi_version: int
    key: str
    num_bytes: int
    tensors: tuple[_Tensor, ...]


def write_packed(
    path: Path,
    key: str,
    weights: PackedWeights,
    written: Callable[[Bytes], None] = lambda _array: None,
) -> None:
    """Write a file whole or not at all; ``written`` is called with each matrix's bytes.

    Raises:
        OSError: there is no room for it, or no right to.
    """
    arrays = list(_arrays(weights))
    header = _header(key, arrays)
    encoded = msgspec.json.encode(header)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(_MAGIC + len(encoded).to_bytes(8, "little"))
            file.write(hashlib.sha256(encoded).digest() + encoded)
            first = _aligned(_START_BYTES + len(encoded))
            for tensor, (_, array, what) in zip(header.tensors, arrays, strict=True):
                file.seek(first + tensor.offset)
                file.write(array.data)
                if isinstance(what, PackedMatrix):
                    written(array)
            file.truncate(first + header.num_bytes)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_packed(path: Path, key: str, *, ahead: bool = True) -> PackedWeights:
    """Map a file that `write_packed` has written.

    ``ahead`` reads it into memory; else it leaves the cache of files.

    Raises:
        OSError: it is not there, or cannot be read.
        CorruptFileError: it is not what was written, or not of this key.
    """
    with path.open("rb") as file:
        header, first = _read_header(file, path)
        size_bytes = os.fstat(file.fileno()).st_size
        if (header.abi_version, header.key) != (ABI_VERSION, key):
            raise CorruptFileError(f"{path.name} holds other weights.")
        if size_bytes != first + header.num_bytes:
            raise CorruptFileError(f"{path.name} is {size_bytes} bytes long, which it must not be.")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if not ahead and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if ahead:
        mapped.madvise(mmap.MADV_WILLNEED)
    data = np.frombuffer(mapped, dtype=np.uint8)
    weights = PackedWeights()
    for tensor in header.tensors:
        start = first + tensor.offset
        if not 0 <= tensor.num_bytes <= len(data) - start:
            raise CorruptFileError(f"{path.name} has a tensor beyond its end.")
        array = data[start : start + tensor.num_bytes]
        if _digest(array) != tensor.digest:
            raise CorruptFileError(f"{path.name} is damaged at {tensor.name}.")
        if tensor.matrix is None:
            weights.vectors[tensor.name] = array.view(np.float32).reshape(tensor.shape)
        else:
            matrix = PackedMatrix(RlMatrix(*tensor.matrix), array)
            weights.matrices[tensor.name] = (*weights.matrices.get(tensor.name, ()), matrix)
    return weights


def _arrays(weights: PackedWeights) -> Iterator[tuple[str, Bytes, PackedMatrix | tuple[int, ...]]]:
    """Every tensor: its name, its bytes, and the matrix or the vector's shape."""
    for name, matrices in weights.matrices.items():
        for matrix in matrices:
            yield name, matrix.data, matrix
    for name, vector in weights.vectors.items():
        yield name, vector.reshape(-1).view(np.uint8), vector.shape


def _header(key: str, arrays: list[tuple[str, Bytes, PackedMatrix | tuple[int, ...]]]) -> _Header:
    tensors, offset = [], 0
    for name, array, what in arrays:
        tensors.append(
            _Tensor(
                name=name,
                offset=offset,
                num_bytes=array.nbytes,
                digest=_digest(array),
                shape=() if isinstance(what, PackedMatrix) else what,
                matrix=_fields(what.struct) if isinstance(what, PackedMatrix) else None,
            )
        )
        offset = _aligned(offset + array.nbytes)
    # Kernels may prefetch beyond the last tile: a page more is there.
    return _Header(
        abi_version=ABI_VERSION, key=key, num_bytes=offset + _PAGE_BYTES, tensors=tuple(tensors)
    )


def _fields(struct: RlMatrix) -> _Fields:
    return (
        struct.format,
        struct.rows,
        struct.columns,
        struct.group,
        struct.has_min,
        struct.has_factors,
        struct.multiplier,
    )


def _read_header(file: BinaryIO, path: Path) -> tuple[_Header, int]:
    """The header, and where the data begins."""
    start = file.read(_START_BYTES)
    length = int.from_bytes(start[8:16], "little")
    encoded = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    intact = start[:8] == _MAGIC and hashlib.sha256(encoded).digest() == start[16:]
    if not intact:
        raise CorruptFileError(f"{path.name} is not a file of packed weights, or is damaged.")
    try:
        header = msgspec.json.decode(encoded, type=_Header)
    except msgspec.DecodeError as error:
        raise CorruptFileError(f"{path.name} has a header of another version.") from error
    return header, _aligned(_START_BYTES + length)


def _digest(array: Bytes) -> str:
    """Of all bytes, or of evenly spaced pages of a large array, the first and the last included."""
    digest = hashlib.blake2b(digest_size=16)
    if array.nbytes <= _SAMPLED_PAGES * _PAGE_BYTES:
        digest.update(array.data)
        return digest.hexdigest()
    for index in range(_SAMPLED_PAGES):
        start = (array.nbytes - _PAGE_BYTES) * index // (_SAMPLED_PAGES - 1)
        digest.update(array[start : start + _PAGE_BYTES].data)
    return digest.hexdigest()


def _aligned(offset: int) -> int:
    return round_up(offset, _PAGE_BYTES)
