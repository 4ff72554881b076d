"""What engines say to each other about KV (`ridgeline.core.channel`)."""

import msgspec

PURPOSE = b"ridgeline kv 001"  # of a connection (`ridgeline.core.doors`)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first word of both ends: what KV it has (`kv_digest`), and which engine it is, by a
    random number; empty where it gives nothing out."""

    digest: str
    engine: bytes


class AskSizes(msgspec.Struct, frozen=True, tag=True):
    """How large are these entries?"""

    keys: list[bytes]


class EntrySizes(msgspec.Struct, frozen=True, tag=True):
    """Bytes of each entry that was asked for, about; 0: it is not there."""

    sizes: list[int]


class AskEntries(msgspec.Struct, frozen=True, tag=True):
    """Send these entries."""

    keys: list[bytes]


class Entries(msgspec.Struct, frozen=True, tag=True):
    """Each entry that was asked for (`encode_entry`, encrypted where a key is set); empty: it is
    not there, or did not fit."""

    values: list[bytes]


Question = Hello | AskSizes | AskEntries
Answer = Hello | EntrySizes | Entries
EMPTY_ENTRY_BYTES = 1 << 12  # of an entry, beside what `Entry.num_bytes` counts
EMPTY_ANSWER_BYTES = 1 << 16
MOST_KEYS = 1 << 13  # in a question
MOST_REPLY_BYTES = 16 << 20  # in an answer of several entries
