"""Who owns which KV block, and which prefixes are cached; executors hold the bytes."""

from ridgeline.kvcache.block_pool import NO_BLOCK, BlockPool
from ridgeline.kvcache.kv_cache_manager import KVCacheManager
from ridgeline.kvcache.prefix_cache import CacheStats, Match, Node, PrefixCache, block_key
from ridgeline.kvcache.reports import KVUsage, MissReport
from ridgeline.kvcache.sequence_kv import SequenceKV
from ridgeline.kvcache.sequence_states import SequenceStates

__all__ = [
    "NO_BLOCK",
    "BlockPool",
    "CacheStats",
    "KVCacheManager",
    "KVUsage",
    "Match",
    "MissReport",
    "Node",
    "PrefixCache",
    "SequenceKV",
    "SequenceStates",
    "block_key",
]
