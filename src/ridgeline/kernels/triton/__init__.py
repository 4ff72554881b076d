"""The ops as Triton kernels, for NVIDIA GPUs; on CPU tensors in Triton's interpreter.

Plain functions over torch tensors that write into outputs passed to them. They allocate nothing,
wait for nothing, take lengths from device memory and their grids from shapes, and so can be
captured into CUDA graphs. The last axis of a tensor is contiguous; the others may be strided.
"""

from ridgeline.core.errors import MissingDependencyError
from ridgeline.kernels.gpu import missing_for_triton

_reason = missing_for_triton()
if _reason is not None:
    raise MissingDependencyError(_reason)

from ridgeline.kernels.triton.activation import activate  # noqa: E402
from ridgeline.kernels.triton.adjustment import (  # noqa: E402
    IN_PROMPT,
    AdjustmentTables,
    adjust_logits,
    count_tokens,
)
from ridgeline.kernels.triton.ahead import compile_ahead, first_of_classes  # noqa: E402
from ridgeline.kernels.triton.attention import (  # noqa: E402
    MAX_TREE_DRAFTS,
    AttentionBatch,
    TreeMask,
    attend_decode,
    attend_prefill,
)
from ridgeline.kernels.triton.grouped import combine, grouped_linear  # noqa: E402
from ridgeline.kernels.triton.interpreted import correct_interpreter  # noqa: E402
from ridgeline.kernels.triton.kv_cache import (  # noqa: E402
    KVTensors,
    layer_bytes,
    layer_tensors,
    move_slots,
)
from ridgeline.kernels.triton.library import (  # noqa: E402
    dequantize,
    matmul,
    multiplies_scaled,
    scaled_matmul,
)
from ridgeline.kernels.triton.linear import (  # noqa: E402
    SMALL_BATCH,
    LinearConfig,
    linear,
    plan_of,
    small_batch,
)
from ridgeline.kernels.triton.norm import normalise, quantize_rows  # noqa: E402
from ridgeline.kernels.triton.packing import (  # noqa: E402
    DeviceMatrix,
    Format,
    fp8_matrix,
    pack_matrix,
    quantize_matrix,
)
from ridgeline.kernels.triton.problems import cannot_be_compiled, kernel_problem  # noqa: E402
from ridgeline.kernels.triton.rope import rope_and_write  # noqa: E402
from ridgeline.kernels.triton.routing import (  # noqa: E402
    ExpertOrder,
    pairs_of_a_block,
    pairs_of_a_pass,
    route,
    sort_by_expert,
)
from ridgeline.kernels.triton.sampling import (  # noqa: E402
    SampleWorkspace,
    SamplingRows,
    sample,
)
from ridgeline.kernels.triton.step import StepRows, begin_step, end_step  # noqa: E402
from ridgeline.kernels.triton.tuning import (  # noqa: E402
    NUM_AXES,
    LinearCall,
    LinearConfigs,
    LinearKey,
    LinearUse,
    batch_class,
    kernels_digest,
    neighbours,
)
from ridgeline.kernels.triton.workspace import Workspace  # noqa: E402

correct_interpreter()

__all__ = [
    "IN_PROMPT",
    "MAX_TREE_DRAFTS",
    "NUM_AXES",
    "SMALL_BATCH",
    "AdjustmentTables",
    "AttentionBatch",
    "DeviceMatrix",
    "ExpertOrder",
    "Format",
    "KVTensors",
    "LinearCall",
    "LinearConfig",
    "LinearConfigs",
    "LinearKey",
    "LinearUse",
    "SampleWorkspace",
    "SamplingRows",
    "StepRows",
    "TreeMask",
    "Workspace",
    "activate",
    "adjust_logits",
    "attend_decode",
    "attend_prefill",
    "batch_class",
    "begin_step",
    "cannot_be_compiled",
    "combine",
    "compile_ahead",
    "count_tokens",
    "dequantize",
    "end_step",
    "first_of_classes",
    "fp8_matrix",
    "grouped_linear",
    "kernel_problem",
    "kernels_digest",
    "layer_bytes",
    "layer_tensors",
    "linear",
    "matmul",
    "move_slots",
    "multiplies_scaled",
    "neighbours",
    "normalise",
    "pack_matrix",
    "pairs_of_a_block",
    "pairs_of_a_pass",
    "plan_of",
    "quantize_matrix",
    "quantize_rows",
    "rope_and_write",
    "route",
    "sample",
    "scaled_matmul",
    "small_batch",
    "sort_by_expert",
]
