"""The ops in plain PyTorch: the shortest code that is right, in any floating-point type.

Shapes: T tokens of a pass, S tokens of one segment, C context, D hidden size, H heads, K KV heads,
d head width. Reductions run in at least float32 (`wide`).
"""

from ridgeline.kernels.reference.attention import attend, first_visible, visible
from ridgeline.kernels.reference.elementwise import (
    activate,
    gated,
    grow_queries,
    softcap,
    wide,
    xielu,
)
from ridgeline.kernels.reference.gated_delta import DeltaInputs, decay_factors, gated_delta
from ridgeline.kernels.reference.latent_attention import (
    absorbing_is_cheaper,
    attend_absorbed,
    attend_plain,
)
from ridgeline.kernels.reference.layer_inputs import known_rows, mix_layer_inputs
from ridgeline.kernels.reference.moe import route, run_experts
from ridgeline.kernels.reference.norm import normalise, normalise_heads
from ridgeline.kernels.reference.rope import rope_tables, rotate
from ridgeline.kernels.reference.selective_scan import ScanInputs, selective_scan
from ridgeline.kernels.reference.short_conv import short_conv
from ridgeline.kernels.reference.streams import above_cutoff, run_stream_op

__all__ = [
    "DeltaInputs",
    "ScanInputs",
    "above_cutoff",
    "absorbing_is_cheaper",
    "activate",
    "attend",
    "attend_absorbed",
    "attend_plain",
    "decay_factors",
    "first_visible",
    "gated",
    "gated_delta",
    "grow_queries",
    "known_rows",
    "mix_layer_inputs",
    "normalise",
    "normalise_heads",
    "rope_tables",
    "rotate",
    "route",
    "run_experts",
    "run_stream_op",
    "selective_scan",
    "short_conv",
    "softcap",
    "visible",
    "wide",
    "xielu",
]
