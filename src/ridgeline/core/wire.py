"""Messages between processes: msgpack by msgspec, typed at both ends; never pickle."""

from typing import Any, TypeVar

import msgspec
import numpy as np

_DTYPES = ("float32", "float64", "uint32", "int32", "int64")
T = TypeVar("T")


def encode_hook(value: Any) -> Any:
    """Arrays as msgspec sends them; for encoders that are kept."""
    if isinstance(value, np.ndarray) and value.dtype.name in _DTYPES:
        return [value.dtype.name, list(value.shape), np.ascontiguousarray(value).tobytes()]
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def decode_hook(expected: type, value: Any) -> Any:
    """Arrays as msgspec receives them; for decoders that are kept."""
    # A numpy annotation arrives as its origin, np.ndarray.
    if getattr(expected, "__origin__", expected) is not np.ndarray:
        raise TypeError(f"{expected} cannot be received from another process")
    dtype, shape, data = value
    if dtype not in _DTYPES:
        raise ValueError(f"arrays of {dtype!r} are not accepted")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def encode(message: object) -> bytes:
    """Serialise a plan, a result, or any dataclass of plain values."""
    return msgspec.msgpack.encode(message, enc_hook=encode_hook)


def decode(data: bytes, message_type: type[T]) -> T:
    """The inverse of `encode`; raises ``msgspec.DecodeError`` on anything that does not fit."""
    return msgspec.msgpack.decode(data, type=message_type, dec_hook=decode_hook)
