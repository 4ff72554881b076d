"""KV blocks beyond the pool: in memory, on disk, in Redis, in other engines, in any `Tier`."""

from ridgeline.kvcache.tiers.coming import ComingEntries
from ridgeline.kvcache.tiers.disk import DiskTier
from ridgeline.kvcache.tiers.entry import Entry, EntryHeader, decode_entry, encode_entry
from ridgeline.kvcache.tiers.peer import PeerFigures, PeerState, PeerTier
from ridgeline.kvcache.tiers.peer_server import PeerServer
from ridgeline.kvcache.tiers.ram import RamTier
from ridgeline.kvcache.tiers.redis import RedisTier
from ridgeline.kvcache.tiers.tier import BlockIO, LocalTier, Tier, TierUsage
from ridgeline.kvcache.tiers.transfer_thread import Load, Look, TransferStats
from ridgeline.kvcache.tiers.transfers import Transfers

__all__ = [
    "BlockIO",
    "ComingEntries",
    "DiskTier",
    "Entry",
    "EntryHeader",
    "Load",
    "LocalTier",
    "Look",
    "PeerFigures",
    "PeerServer",
    "PeerState",
    "PeerTier",
    "RamTier",
    "RedisTier",
    "Tier",
    "TierUsage",
    "TransferStats",
    "Transfers",
    "decode_entry",
    "encode_entry",
]
