"""The ops in plain PyTorch: the shortest code that is right, in any floating-point type.

Shapes: T tokens of a pass, S tokens of one segment, C context, D hidden size, H heads, K KV heads,
d head width. Reductions run in at least float32 (`wide`).
"""

from ridgeline.kernels.reference.attention import attend, visible
from ridgeline.kernels.reference.elementwise import activate, softcap, wide
from ridgeline.kernels.reference.norm import normalise
from ridgeline.kernels.reference.rope import rope_tables, rotate

__all__ = [
    "activate",
    "attend",
    "normalise",
    "rope_tables",
    "rotate",
    "softcap",
    "visible",
    "wide",
]
