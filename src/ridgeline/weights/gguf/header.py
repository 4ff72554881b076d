"""The header of a GGUF file, read with every number checked against the file's size.

Layout (version 3; version 2 is the same), all little-endian:

- ``GGUF``, uint32 version, uint64 number of tensors, uint64 number of metadata keys;
- for each key: string, uint32 value type, value (see `values`);
- for each tensor: string, uint32 number of dimensions, uint64 each (the fastest first), uint32
  format, uint64 offset into the data;
- zeros up to a multiple of ``general.alignment`` (32 if absent), then the data.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.core.rounding import round_up
from ridgeline.quant.gguf_formats import GGUF_FORMATS, GGUFFormat
from ridgeline.weights.gguf.values import Cursor, MalformedError, Metadata, read_metadata
from ridgeline.weights.names import short_name

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS = 65_536
_MAX_TENSORS = 1 << 17
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 1024
DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFEntry:
    """Where a tensor lies: its format, shape (slowest axis first) and half-open byte range."""

    format: GGUFFormat
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    """What a GGUF file says of itself; tensors are in the file's order."""

    metadata: Metadata
    tensors: Mapping[str, GGUFEntry]


def read_header(file: BinaryIO, size_bytes: int, name: str) -> GGUFHeader:
    """The header of an open GGUF file of ``size_bytes``; ``name`` is how errors call it.

    Raises:
        CorruptFileError: the file is cut short or contradicts itself.
        UnsupportedModelError: its version, byte order or a tensor's format is not one that is read.
    """
    try:
        return _read(Cursor(file, size_bytes), name)
    except MalformedError as error:
        raise CorruptFileError(f"{name} is not a valid GGUF file: {error}.") from None


def _read(cursor: Cursor, name: str) -> GGUFHeader:
    if cursor.take(4) != MAGIC:
        raise MalformedError("it does not start with GGUF")
    _check_version(cursor.unsigned(4), name)
    num_tensors, num_keys = cursor.unsigned(8), cursor.unsigned(8)
    if num_keys > _MAX_KEYS:
        raise MalformedError(f"it claims {num_keys} metadata keys")
    if num_tensors > _MAX_TENSORS:
        raise MalformedError(f"it claims {num_tensors} tensors")
    metadata = read_metadata(cursor, num_keys)
    cursor.expect(num_tensors * _MIN_TENSOR_BYTES, f"{num_tensors} tensors")
    infos = [_tensor_info(cursor, name) for _ in range(num_tensors)]
    alignment = _alignment(metadata)
    data_start = round_up(cursor.position, alignment)
    return GGUFHeader(metadata=metadata, tensors=_placed(infos, data_start, alignment, cursor.size))


def _check_version(version: int, name: str) -> None:
    if version & 0xFFFF == 0:
        raise UnsupportedModelError(
            f"{name} is a big-endian GGUF file; convert it with gguf_convert_endian.py."
        )
    if version not in _VERSIONS:
        raise UnsupportedModelError(
            f"{name} is GGUF version {version}, and Ridgeline reads versions 2 and 3; convert the "
            "model again with a current llama.cpp."
        )


def _alignment(metadata: Metadata) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int):
        raise MalformedError("its general.alignment is no number")
    if not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise MalformedError(f"its general.alignment is {value}")
    return value


_Info = tuple[str, GGUFFormat, tuple[int, ...], int]


def _tensor_info(cursor: Cursor, file_name: str) -> _Info:
    """Name, format, shape and offset of one tensor."""
    name = cursor.name(_MAX_NAME_BYTES)
    dimensions = cursor.unsigned(4)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise MalformedError(f"tensor {short_name(name)} has {dimensions} dimensions")
    shape = tuple(cursor.unsigned(8) for _ in range(dimensions))[::-1]
    number = cursor.unsigned(4)
    fmt = GGUF_FORMATS.get(number)
    if fmt is None:
        raise UnsupportedModelError(
            f"Tensor {short_name(name)} in {file_name} has the unknown GGUF format {number}; "
            "take a file in a current format such as Q4_K_M or Q8_0."
        )
    offset = cursor.unsigned(8)
    elements = math.prod(shape)
    if not 0 < elements < 2**63:
        raise MalformedError(f"tensor {short_name(name)} has {elements:.3g} elements")
    if shape[-1] % fmt.block_elements:
        raise MalformedError(
            f"tensor {short_name(name)} has rows of {shape[-1]} elements, which are no whole "
            f"{fmt.name} blocks"
        )
    return name, fmt, shape, offset


def _placed(
    infos: list[_Info], data_start: int, alignment: int, size_bytes: int
) -> dict[str, GGUFEntry]:
    """Entries with file offsets, once all lie in the file and none overlaps another."""
    placed: dict[str, GGUFEntry] = {}
    for name, fmt, shape, offset in infos:
        if name in placed:
            raise MalformedError(f"tensor {short_name(name)} occurs twice")
        start = data_start + offset
        stop = start + fmt.num_bytes(math.prod(shape))
        if offset % alignment:
            raise MalformedError(f"the offset of tensor {short_name(name)} is not aligned")
        if stop > size_bytes:
            raise MalformedError(
                f"tensor {short_name(name)} ends at byte {stop} and the file has {size_bytes}"
            )
        placed[name] = GGUFEntry(format=fmt, shape=shape, start=start, stop=stop)
    end = 0
    for name, entry in sorted(placed.items(), key=lambda item: item[1].start):
        if entry.start < end:
            raise MalformedError(f"the data of tensor {short_name(name)} overlaps another's")
        end = entry.stop
    return placed
