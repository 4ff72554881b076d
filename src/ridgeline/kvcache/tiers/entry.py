"""One block of tokens as tiers keep it: what it is, and the bytes of its KV.

As bytes: magic, length of the header, BLAKE2b of the header, header (msgpack), KV. The header has
the KV's own BLAKE2b, so that it can be read and trusted alone.
"""

import hashlib
import struct
from dataclasses import dataclass

import msgspec

from ridgeline.core.errors import CorruptFileError

_MAGIC = b"RLKV0001"
_PREFIX = struct.Struct("<8sI16s")
PREFIX_BYTES = _PREFIX.size
MAX_HEADER_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryHeader:
    """Names a block exactly.

    ``key`` finds it; ``root_key``, ``parent_uid`` and ``token_ids`` verify it. ``uid`` is a random
    number that its children refer to, so that a chain of entries is verified token by token, and
    nothing rests on the hash. ``sizes[g]`` are the bytes of KV group g.
    """

    key: bytes
    root_key: bytes
    uid: bytes
    parent_uid: bytes
    tenant: str
    token_ids: tuple[int, ...]
    sizes: tuple[int, ...]
    kv_digest: bytes

    def is_block(self, *, root_key: bytes, parent_uid: bytes, token_ids: tuple[int, ...]) -> bool:
        """Whether it is these tokens after that parent."""
        return (
            self.root_key == root_key
            and self.parent_uid == parent_uid
            and self.token_ids == token_ids
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A header and the KV of all groups, one after the other."""

    header: EntryHeader
    kv: bytes

    def of_group(self, group: int) -> bytes:
        """The KV of one group."""
        start = sum(self.header.sizes[:group])
        return self.kv[start : start + self.header.sizes[group]]

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory, and on disk."""
        return len(self.kv) + 4 * len(self.header.token_ids) + 256


def digest(data: bytes) -> bytes:
    """16 bytes of BLAKE2b."""
    return hashlib.blake2b(data, digest_size=16).digest()


def encode_entry(entry: Entry) -> bytes:
    """The entry as bytes."""
    header = msgspec.msgpack.encode(entry.header)
    return _PREFIX.pack(_MAGIC, len(header), digest(header)) + header + entry.kv


def header_length(prefix: bytes) -> int:
    """Bytes of the header that follows the first `PREFIX_BYTES`.

    Raises:
        CorruptFileError: this is not the start of an entry.
    """
    if len(prefix) < PREFIX_BYTES:
        raise CorruptFileError("A KV entry is cut short.")
    magic, length, _ = _PREFIX.unpack(prefix[:PREFIX_BYTES])
    if magic != _MAGIC or length > MAX_HEADER_BYTES:
        raise CorruptFileError("This is not a KV entry of this version.")
    return int(length)


def decode_header(data: bytes) -> EntryHeader:
    """The header of an entry of which at least prefix and header are given.

    Raises:
        CorruptFileError: it is damaged.
    """
    length = header_length(data)
    header = data[PREFIX_BYTES : PREFIX_BYTES + length]
    if digest(header) != _PREFIX.unpack(data[:PREFIX_BYTES])[2]:
        raise CorruptFileError("The header of a KV entry is damaged.")
    try:
        return msgspec.msgpack.decode(header, type=EntryHeader)
    except msgspec.DecodeError as error:
        raise CorruptFileError("The header of a KV entry is of another version.") from error


def decode_entry(data: bytes) -> Entry:
    """The inverse of `encode_entry`.

    Raises:
        CorruptFileError: a checksum or a size does not fit.
    """
    header = decode_header(data)
    kv = data[PREFIX_BYTES + header_length(data) :]
    if len(kv) != sum(header.sizes) or digest(kv) != header.kv_digest:
        raise CorruptFileError("The KV of an entry is damaged.")
    return Entry(header, kv)
