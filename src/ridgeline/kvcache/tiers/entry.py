"""One block of tokens as tiers keep it: what it is, and the bytes of its KV.

As bytes: magic, length of the header, BLAKE2b of the header, header (msgpack), KV. The header has
the KV's own BLAKE2b, so that it can be read and trusted alone.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ridgeline.core.errors import CorruptFileError

_MAGIC = b"RLKV0002"
_PREFIX = struct.Struct("<8sI16s")
PREFIX_BYTES = _PREFIX.size
MAX_HEADER_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryHeader:
    """Names a block exactly.

    ``key`` finds it; ``root_key``, ``token_ids`` and ``uid`` (`block_uid`) verify it. So a
    collision of keys is a miss, and all engines give the same block the same names.
    ``sizes[g]`` are the bytes of KV group g.
    """

    key: bytes
    root_key: bytes
    uid: bytes
    tenant: str
    token_ids: tuple[int, ...]
    sizes: tuple[int, ...]
    kv_digest: bytes

    def is_block(self, *, root_key: bytes, uid: bytes, token_ids: tuple[int, ...]) -> bool:
        """Whether it is these tokens after those that ``uid`` stands for as well."""
        return self.root_key == root_key and self.uid == uid and self.token_ids == token_ids


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


def block_uid(parent_uid: bytes, token_ids: Sequence[int]) -> bytes:
    """32 bytes of BLAKE2b over the parent's (a root's key at first) and the tokens.

    Another hash than that of keys: one block is taken for another only where both collide.
    """
    tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.blake2b(parent_uid + tokens, digest_size=32).digest()


def digest(data: bytes) -> bytes:
    """16 bytes of BLAKE2b."""
    return hashlib.blake2b(data, digest_size=16).digest()


def tenant_mark(tenant: str) -> str:
    """A tenant where entries lie: names may hold anything, those of folders may not."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]


def content_name(key: bytes) -> str:
    """What an encrypted entry is bound to (`ridgeline.core.encryption`)."""
    return f"kv {key.hex()}"


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
