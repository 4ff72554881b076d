"""Metadata of a GGUF file: typed values under dotted keys, bounded before anything is allocated.

Value types: 0–5 uint8, int8, uint16, int16, uint32, int32; 6 float32; 7 bool (one byte); 8 string
(uint64 length, UTF-8); 9 array (uint32 element type, uint64 length, elements); 10–12 uint64, int64,
float64.
"""

import struct
from collections.abc import Mapping
from io import SEEK_CUR
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ridgeline.weights.names import short_name

Metadata = Mapping[str, object]
"""Key to ``int``, ``float``, ``bool``, ``str``, a list of strings, a numpy array, or lists."""

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip

_MAX_KEY_BYTES = 65_535
_MAX_STRING_BYTES = 64 << 20
_MAX_STRINGS = 1 << 22
_MAX_ARRAYS = 4096
_WINDOW_BYTES = 1 << 16
_MAX_ARRAY_BYTES = 256 << 20
_MAX_NESTING = 2
_MIN_KEY_BYTES = 8 + 1 + 4 + 1


class MalformedError(Exception):
    """What is wrong with a header, as the end of a sentence."""


class Cursor:
    """Reads a header front to back; nothing is read that the file cannot hold.

    ``position`` is the offset in the file of the next byte, ``size`` the file's length.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size
        self.position = 0

    def expect(self, num_bytes: int, what: str) -> None:
        """Raise `MalformedError` if fewer than ``num_bytes`` are left for ``what``."""
        if num_bytes > self.size - self.position:
            raise MalformedError(
                f"{what} would take {num_bytes} bytes at offset {self.position} and the file has "
                f"{self.size}"
            )

    def take(self, num_bytes: int) -> bytes:
        """The next bytes."""
        if num_bytes > self.size - self.position:
            self.expect(num_bytes, "a value")
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise MalformedError("it became shorter while it was being read")
        self.position += num_bytes
        return data

    def unsigned(self, num_bytes: int) -> int:
        """A little-endian unsigned number."""
        return int.from_bytes(self.take(num_bytes), "little")

    def name(self, limit_bytes: int) -> str:
        """A key or the name of a tensor: strict UTF-8, not empty, at most ``limit_bytes``."""
        length = self.unsigned(8)
        if not 0 < length <= limit_bytes:
            raise MalformedError(f"a name at offset {self.position} has {length} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise MalformedError(f"a name before offset {self.position} is not UTF-8") from None

    def string(self) -> str:
        """A string value; what is not UTF-8 becomes U+FFFD, as some files have it in remarks."""
        length = self.unsigned(8)
        if length > _MAX_STRING_BYTES:
            raise MalformedError(f"a string at offset {self.position} has {length} bytes")
        return self.take(length).decode("utf-8", "replace")

    def strings(self, count: int) -> list[str]:
        """``count`` string values, read in large pieces."""
        found: list[str] = []
        window, at = b"", 0
        for _ in range(count):
            if at + 8 > len(window):
                window, at = self._refill(window[at:], 8), 0
            stop = at + 8 + int.from_bytes(window[at : at + 8], "little")
            if stop > len(window):
                window, at, stop = self._refill(window[at:], stop - at), 0, stop - at
            found.append(window[at + 8 : stop].decode("utf-8", "replace"))
            at = stop
        self._file.seek(at - len(window), SEEK_CUR)
        self.position -= len(window) - at
        return found

    def _refill(self, rest: bytes, need: int) -> bytes:
        """``rest`` and what follows it in the file, ``need`` bytes at least."""
        self.expect(need - len(rest), "a string")
        if need > _MAX_STRING_BYTES:
            raise MalformedError(f"a string at offset {self.position} has {need} bytes")
        wanted = max(need - len(rest), min(_WINDOW_BYTES, self.size - self.position))
        return rest + self.take(wanted)


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    """The next ``count`` keys and values; raises `MalformedError`."""
    cursor.expect(count * _MIN_KEY_BYTES, f"{count} metadata keys")
    metadata: dict[str, object] = {}
    for _ in range(count):
        key = cursor.name(_MAX_KEY_BYTES)
        if key in metadata:
            raise MalformedError(f"key {short_name(key)} occurs twice")
        metadata[key] = _value(cursor, cursor.unsigned(4), _MAX_NESTING)
    return metadata


def _value(cursor: Cursor, kind: int, nesting: int) -> object:
    if kind in _NUMBERS:
        return _numbers(cursor, np.dtype(_NUMBERS[kind]), 1)[0].item()
    if kind == _BOOL:
        return _bools(cursor, 1)[0].item()
    if kind == _STRING:
        return cursor.string()
    if kind == _ARRAY:
        return _array(cursor, nesting)
    raise MalformedError(f"a value before offset {cursor.position} has the unknown type {kind}")


def _array(cursor: Cursor, nesting: int) -> object:
    kind, length = cursor.unsigned(4), cursor.unsigned(8)
    if kind in _NUMBERS:
        return _numbers(cursor, np.dtype(_NUMBERS[kind]), length)
    if kind == _BOOL:
        return _bools(cursor, length)
    if kind not in (_STRING, _ARRAY):
        raise MalformedError(f"an array before offset {cursor.position} has the type {kind}")
    # A string takes at least its length, an array its type and length.
    cursor.expect(length * (8 if kind == _STRING else 12), f"an array of {length}")
    if length > (_MAX_STRINGS if kind == _STRING else _MAX_ARRAYS):
        raise MalformedError(f"an array before offset {cursor.position} has {length} elements")
    if kind == _STRING:
        return cursor.strings(length)
    if nesting == 0:
        raise MalformedError(f"arrays before offset {cursor.position} are nested too deeply")
    return [_array(cursor, nesting - 1) for _ in range(length)]


def _numbers(cursor: Cursor, dtype: np.dtype[np.generic], length: int) -> npt.NDArray[np.generic]:
    num_bytes = length * dtype.itemsize
    cursor.expect(num_bytes, f"an array of {length}")
    if num_bytes > _MAX_ARRAY_BYTES:
        raise MalformedError(f"an array before offset {cursor.position} has {num_bytes} bytes")
    return np.frombuffer(cursor.take(num_bytes), dtype)


def _bools(cursor: Cursor, length: int) -> npt.NDArray[np.bool_]:
    values = _numbers(cursor, np.dtype("<u1"), length)
    if length and values.max() > 1:
        raise MalformedError(f"a bool before offset {cursor.position} is neither 0 nor 1")
    return values.astype(np.bool_)


def encode_value(value: object) -> bytes:
    """The type and bytes of a value: the inverse of `read_metadata`.

    A Python ``int`` is uint32, a ``float`` float32; numpy's scalars and arrays keep their types.
    """
    match value:
        case bool():
            return _unsigned(_BOOL) + bytes([value])
        case str():
            return _unsigned(_STRING) + _sized(value.encode())
        case int():
            return encode_value(np.uint32(value))
        case float() if not isinstance(value, np.generic):
            return encode_value(np.float32(value))
        case np.generic():
            return _unsigned(_number_type(value.dtype)) + value.tobytes()
        case np.ndarray() if value.dtype == np.bool_:
            return _unsigned(_ARRAY) + _array_header(_BOOL, len(value)) + value.tobytes()
        case np.ndarray():
            return (
                _unsigned(_ARRAY)
                + _array_header(_number_type(value.dtype), len(value))
                + value.tobytes()
            )
        case list():
            texts = b"".join(_sized(text.encode()) for text in value)
            return _unsigned(_ARRAY) + _array_header(_STRING, len(value)) + texts
        case _:
            raise TypeError(type(value))


def _number_type(dtype: np.dtype[np.generic]) -> int:
    return next(number for number, text in _NUMBERS.items() if np.dtype(text) == dtype)


def _array_header(kind: int, length: int) -> bytes:
    return struct.pack("<IQ", kind, length)


def _unsigned(value: int) -> bytes:
    return struct.pack("<I", value)


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
