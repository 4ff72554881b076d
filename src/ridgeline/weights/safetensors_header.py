"""The header of a safetensors file, read with every number checked against the file's size.

Layout: an 8-byte little-endian header length, the header (a JSON object that maps each tensor's
name to its dtype, shape and half-open byte range), then the data. The ranges must tile the data
exactly: no gap, no overlap, nothing after the last one.
Source: https://github.com/huggingface/safetensors, "Format".
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from ridgeline.core.arrays import numpy_dtype
from ridgeline.core.errors import CorruptFileError
from ridgeline.weights.names import short_name

# A tensor takes about 120 bytes of header: this is enough for 130,000 of them in one file. JSON
# made to hurt takes up to some 40 times its size in memory, so this also bounds that.
MAX_HEADER_BYTES = 16 << 20
_PREFIX_BYTES = 8
_MAX_DIMENSIONS = 32
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}

DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies: its safetensors dtype, shape and half-open byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _HeaderError(Exception):
    """What is wrong with a header, as the end of a sentence."""


def read_header(file: BinaryIO, size_bytes: int, name: str) -> dict[str, TensorEntry]:
    """The tensors of an open safetensors file of ``size_bytes``, in the order of their data.

    Raises:
        CorruptFileError: the file is cut short or contradicts itself; ``name`` is how it is called.
    """
    try:
        length = _header_length(file, size_bytes)
        text = file.read(length)
        if len(text) < length:
            raise _HeaderError("it ends inside its header")
        return _entries(_fields(text), _PREFIX_BYTES + length, size_bytes)
    except _HeaderError as error:
        raise CorruptFileError(f"{name} is not a valid safetensors file: {error}.") from None


def _header_length(file: BinaryIO, size_bytes: int) -> int:
    prefix = file.read(_PREFIX_BYTES)
    if len(prefix) < _PREFIX_BYTES:
        raise _HeaderError(f"it has only {len(prefix)} bytes")
    length = int.from_bytes(prefix, "little")
    if length > size_bytes - _PREFIX_BYTES:
        raise _HeaderError(f"its header claims {length} bytes and the file has {size_bytes}")
    if length > MAX_HEADER_BYTES:
        raise _HeaderError(f"its header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
    return length


def _fields(text: bytes) -> dict[str, object]:
    """The header's outer object, its tensor entries made."""
    if not text.startswith(b"{"):
        raise _HeaderError("its header is not a JSON object")
    others = 0

    def make(pairs: list[tuple[str, object]]) -> object:
        nonlocal others
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise _HeaderError("a name in its header occurs twice")
        if (entry := _entry(fields)) is not None:
            return entry
        # Only the metadata and the outer object are no entries. To stop at the third keeps a header
        # of many odd objects from filling the memory.
        others += 1
        if others > 2:
            raise _HeaderError("an entry in its header is malformed")
        return fields

    try:
        outer = json.loads(text.decode("utf-8"), object_pairs_hook=make, parse_constant=_refuse)
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise _HeaderError("its header is not valid JSON in UTF-8") from None
    if not isinstance(outer, dict):
        raise _HeaderError("its header is not a mapping of names to entries")
    return outer


def _refuse(constant: str) -> object:
    raise ValueError(constant)


def _entry(fields: dict[str, object]) -> TensorEntry | None:
    """A well-typed tensor entry, made at once so that large headers stay small in memory."""
    if fields.keys() != _ENTRY_KEYS:
        return None
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        return None
    if len(offsets) != 2 or not all(type(n) is int and 0 <= n < 2**63 for n in shape + offsets):
        return None
    start, stop = offsets
    return TensorEntry(dtype=dtype, shape=tuple(shape), start=start, stop=stop)


def _entries(fields: dict[str, object], data_start: int, size_bytes: int) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for name, value in fields.items():
        if name == "__metadata__":
            _check_metadata(value)
        elif not isinstance(value, TensorEntry) or any("\ud800" <= c <= "\udfff" for c in name):
            raise _HeaderError(f"the entry of tensor {short_name(name)} is malformed")
        else:
            found[name] = value
    ordered = sorted(found.items(), key=lambda item: (item[1].start, item[1].stop))
    return _placed(ordered, data_start, size_bytes)


def _check_metadata(value: object) -> None:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise _HeaderError("its __metadata__ is not a mapping of text to text")


def _placed(
    ordered: list[tuple[str, TensorEntry]], data_start: int, size_bytes: int
) -> dict[str, TensorEntry]:
    """Entries with file offsets, once the ranges are known to tile the data exactly."""
    placed: dict[str, TensorEntry] = {}
    end = 0
    for name, entry in ordered:
        if entry.start != end or entry.stop < entry.start:
            raise _HeaderError(
                f"the data of tensor {short_name(name)} overlaps, leaves a gap or ends early"
            )
        end = entry.stop
        _check_size(name, entry)
        placed[name] = TensorEntry(
            dtype=entry.dtype,
            shape=entry.shape,
            start=data_start + entry.start,
            stop=data_start + entry.stop,
        )
    if data_start + end != size_bytes:
        raise _HeaderError(
            f"its header describes {data_start + end} bytes and the file has {size_bytes}"
        )
    return placed


def _check_size(name: str, entry: TensorEntry) -> None:
    """The byte range must be what dtype and shape need; other dtypes fail when they are read."""
    if len(entry.shape) > _MAX_DIMENSIONS:
        raise _HeaderError(f"tensor {short_name(name)} has {len(entry.shape)} dimensions")
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        return
    # Zeros count as ones here: numpy multiplies the other extents even if the array is empty.
    span = numpy_dtype(dtype).itemsize * math.prod(max(extent, 1) for extent in entry.shape)
    need = 0 if 0 in entry.shape else span
    if span >= 2**63 or need != entry.stop - entry.start:
        raise _HeaderError(
            f"tensor {short_name(name)} has {entry.stop - entry.start} bytes, "
            "which is not what its dtype and shape need"
        )
