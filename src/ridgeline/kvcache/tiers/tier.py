"""What a place for KV blocks beyond the pool has to offer, and what it needs of the executor."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ridgeline.kvcache.tiers.entry import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUsage:
    """What is kept, and what happened since the start. ``num_failures``: damaged, or I/O errors.

    Tiers elsewhere have no capacity of their own, and evict without telling.
    """

    name: str
    num_entries: int
    num_bytes: int
    capacity_bytes: int = 0
    num_evicted: int = 0
    num_failures: int


class Tier(Protocol):
    """Keeps entries by key, the least recently used going first when it is full.

    All methods but `may_have`, `is_unsure` and `usage` are called from one thread, and may block.
    ``is_read_only``: nothing is put into it, and it has only what others have computed.
    """

    is_read_only: bool

    def may_have(self, key: bytes) -> bool:
        """Whether asking for the entry is worth it. Answers at once, from any thread."""

    def is_unsure(self, key: bytes) -> bool:
        """Whether `look` can say more than `may_have` does now. Answers at once, as well."""

    def look(self, keys: Sequence[bytes]) -> None:
        """Find out which entries are there; `may_have` knows then."""

    def get_all(self, keys: Sequence[bytes]) -> Mapping[bytes, Entry]:
        """The entries that are there, have not expired and are not damaged."""

    def touch_all(self, keys: Sequence[bytes]) -> Collection[bytes]:
        """Count entries as used, in this order, without reading them.

        Returns the keys of those that need not be put again.
        """

    def put_all(self, entries: Sequence[Entry]) -> None:
        """Keep entries; one that cannot be kept is let go of, and counted."""

    def delete_tenant(self, tenant: str) -> bool:
        """Forget what a tenant's requests left: all, or what takes no longer than others may wait.

        Returns whether that was all; if not, it is called again. Nothing of it is given out
        meanwhile.
        """

    def expire(self) -> None:
        """Let go of what has expired. Called about once a second, and costs little."""

    def usage(self) -> TierUsage: ...

    def close(self) -> None: ...


class LocalTier(Protocol):
    """The part of a `Tier` that is the same where entries are had one by one, at once."""

    is_read_only: bool = False

    def is_unsure(self, _key: bytes) -> bool:
        return False

    def look(self, _keys: Sequence[bytes]) -> None:
        return

    def get_all(self, keys: Sequence[bytes]) -> Mapping[bytes, Entry]:
        found = ((key, self.get(key)) for key in keys)
        return {key: entry for key, entry in found if entry is not None}

    def touch_all(self, keys: Sequence[bytes]) -> Collection[bytes]:
        return {key for key in keys if self.touch(key)}

    def put_all(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.put(entry)

    def get(self, key: bytes) -> Entry | None:
        """An entry; ``None`` if it is not there, has expired or is damaged."""

    def touch(self, key: bytes) -> bool:
        """Count an entry as used, without reading it; False if it is not there."""

    def put(self, entry: Entry) -> None:
        """Keep an entry; one that cannot be kept is let go of, and counted."""


class BlockIO(Protocol):
    """The part of `ridgeline.core.protocols.Executor` that moves the bytes of blocks."""

    def export_blocks(self, group: int, blocks: Sequence[int]) -> bytes: ...

    def import_blocks(self, group: int, blocks: Sequence[int], data: bytes) -> None: ...
