"""Who owns which KV block. Integers only: the bytes live in executors."""

from ridgeline.kvcache.block_pool import BlockPool

__all__ = ["BlockPool"]
