"""Plans on our C++ kernels."""

from ridgeline.executors.cpu.executor import CPUExecutor
from ridgeline.executors.cpu.kv_cache import KV_SUB_BLOCK
from ridgeline.executors.cpu.packed_cache import PackedCache

__all__ = ["KV_SUB_BLOCK", "CPUExecutor", "PackedCache"]
