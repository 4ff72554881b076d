"""The structs and constants of csrc/cpu/ridgeline_cpu.h, which says what they mean.

Each has the name that it has there: `RlMatrix` is ``rl_matrix``, `SEQUENCE` ``rl_sequence``, and
`RlFormat.BF16` ``RL_BF16``.
"""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

import numpy as np


class RlFormat(IntEnum):
    """How elements are stored; from Q4 on they are codes with scales, of matrices."""

    FP8 = -2
    INT4 = -1
    F32 = 0
    F16 = 1
    BF16 = 2
    INT8 = 3
    Q4 = 4
    Q5 = 5
    Q6 = 6
    Q8 = 8
    Q2 = 12  # 2 and 3 are taken
    Q3 = 13

    @property
    def is_quantized(self) -> bool:
        return self >= RlFormat.Q4

    @classmethod
    def of_bits(cls, bits: float) -> "RlFormat":
        """That of codes of so many bits."""
        return cls[f"Q{bits:g}"]

    @property
    def bits(self) -> int:
        """Of a code."""
        assert self.is_quantized
        return int(self.name[1:])


class RlBuffer(IntEnum):
    """The named buffers of a program."""

    X = 0
    H = 1
    N = 2
    SHARED = 3
    QUERY = 4
    KEY = 5
    VALUE = 6
    INNER = 7
    LAYERS = 8
    STREAMS = 9


class RlSpanKind(IntEnum):
    """What a span of a recording is."""

    OP = 0
    JOB = 1
    SHARE = 2


class RlPart(IntEnum):
    """Parts of a step that are no op of a program."""

    ROPE_TABLES = -1
    HEAD = -2
    SAMPLE = -3
    NONE = -4


class RlMatrix(ctypes.Structure):
    _fields_ = (
        ("format", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("group", c_int32),
        ("has_min", c_int32),
        ("has_factors", c_int32),
        ("multiplier", c_float),
        ("data", c_void_p),
    )


class RlLinear(ctypes.Structure):
    _fields_ = (("matrix", RlMatrix), ("bias", c_void_p), ("slot", c_int32))


class RlAdapterPart(ctypes.Structure):
    _fields_ = (("slot", c_int32), ("down", RlMatrix), ("up", RlMatrix))


class RlAdapter(ctypes.Structure):
    _fields_ = (("num_parts", c_int32), ("parts", POINTER(RlAdapterPart)))


class RlKVGroup(ctypes.Structure):
    _fields_ = (
        ("format", c_int32),
        ("block_tokens", c_int32),
        ("num_layers", c_int32),
        ("num_kv_heads", c_int32),
        ("k_width", c_int32),
        ("v_width", c_int32),
        ("layer_bytes", c_int64),
        ("block_bytes", c_int64),
        ("data", c_void_p),
        ("first_block", c_int32),
        ("num_blocks", c_int32),
    )


class RlBatch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("sequences", c_void_p),
        ("token_types", c_void_p),
    )


class RlAttention(ctypes.Structure):
    _fields_ = (
        ("num_heads", c_int32),
        ("out_width", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        ("sinks", c_void_p),
        ("bidirectional", c_int32),
        ("chunked", c_int32),
    )


class RlGatedDelta(ctypes.Structure):
    _fields_ = (
        ("num_key_heads", c_int32),
        ("num_value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("conv_length", c_int32),
    )


class RlSelectiveScan(ctypes.Structure):
    _fields_ = (
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("num_groups", c_int32),
        ("state_dim", c_int32),
        ("conv_length", c_int32),
    )


class RlNorm(ctypes.Structure):
    _fields_ = (("kind", c_int32), ("unit_offset", c_int32), ("eps", c_float))


class RlActivation(ctypes.Structure):
    _fields_ = (("kind", c_int32), ("alpha", c_float), ("limit", c_float))


class RlXielu(ctypes.Structure):
    _fields_ = (("rise", c_float), ("fall", c_float), ("beta", c_float), ("eps", c_float))


class RlRouting(ctypes.Structure):
    _fields_ = (
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("scoring", c_int32),
        ("normalised", c_int32),
        ("scale", c_float),
        ("num_groups", c_int32),
        ("top_groups", c_int32),
        ("group_best_two", c_int32),
        ("scales_inputs", c_int32),
    )


# Those that come in arrays, filled for each step.
SEQUENCE = np.dtype(
    [
        ("first_row", np.int32),
        ("num_tokens", np.int32),
        ("start", np.int32),
        ("num_drafts", np.int32),
        ("ancestors", np.uint64),
        ("block_tables", np.uint64),
        ("state", np.uint64),
        ("saves", np.uint64),
        ("num_saves", np.int32),
        ("lag", np.int32),
        ("lag_row", np.int32),
        ("lagging", np.uint64),
        ("drafted", np.uint64),
        ("sinks", np.int32),
        ("window", np.int32),
        ("cuts", np.uint64),
        ("whole_row", np.int32),
    ],
    align=True,
)
STATE_SAVE = np.dtype([("position", np.int32), ("state", np.uint64)], align=True)
SAMPLING = np.dtype(
    [
        ("logits", np.uint64),
        ("mask", np.uint64),
        ("barred", np.uint64),
        ("num_barred", np.int32),
        ("barred_until", np.uint32),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("seed", np.uint64),
        ("sample_index", np.uint32),
        ("position", np.uint32),
    ],
    align=True,
)

# Those of a recording, of which there are thousands.
SPAN = np.dtype(
    [
        ("kind", np.int32),
        ("op", np.int32),
        ("thread", np.int32),
        ("num_tiles", np.int32),
        ("begin_ns", np.int64),
        ("end_ns", np.int64),
        ("busy_ns", np.int64),
    ],
    align=True,
)

P = c_void_p
I32, I64, F32 = c_int32, c_int64, c_float

# Result and argument types of every function; structs go by reference.
FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "rl_abi_version": (I32, ()),
    "rl_isa_name": (ctypes.c_char_p, ()),
    "rl_pool_new": (P, (I32,)),
    "rl_pool_free": (None, (P,)),
    "rl_group_bytes": (I64, (I32, I64)),
    "rl_group_new": (P, (P, I32, I32, I64)),
    "rl_group_free": (None, (P,)),
    "rl_gather": (I32, (P, P, P, I64, P, I64, P, I32)),
    "rl_gather_rows": (I32, (P, P, P, I64, I64, P, I32)),
    "rl_group_counts": (None, (P, P, P)),
    "rl_record": (I32, (P, I32)),
    "rl_num_spans": (I64, (P,)),
    "rl_take_spans": (None, (P, P)),
    "rl_matrix_bytes": (I64, (P,)),
    "rl_pack": (I32, (P, P, P, I32, I32, I32)),
    "rl_pack_codes": (None, (P, P, P, P, P, P)),
    "rl_unpack_rows": (None, (P, P, P, I32, P)),
    "rl_matmul": (I32, (P, P, P, P, I64, P, I64, I32, P)),
    "rl_matmul_scratch_bytes": (I64, (P, I32)),
    "rl_kv_group_sizes": (None, (P,)),
    "rl_kv_write": (None, (P, P, I32, I32, P, P, P)),
    "rl_kv_move": (I32, (P, P, P, P, I32)),
    "rl_kv_read": (None, (P, I32, P, I32, I32, P, P)),
    "rl_attend": (None, (P, P, I32, I32, P, P, P, P, P)),
    "rl_attend_scratch_bytes": (I64, (P, P, P, I32)),
    "rl_program_new": (P, (P,)),
    "rl_program_free": (None, (P,)),
    "rl_add_embed": (I32, (P, P, I32, F32, P, P)),
    "rl_add_norm": (I32, (P, I32, I32, P, P, P, I32)),
    "rl_add_qkv": (I32, (P, I32, P, P, P, F32)),
    "rl_add_head_norm": (I32, (P, P, I32, *[P] * 4, *[I32] * 4)),
    "rl_add_rope": (I32, (P, *[I32] * 8)),
    "rl_add_kv_write": (I32, (P, I32, I32)),
    "rl_add_grow_queries": (I32, (P, F32, I32, I32, I32)),
    "rl_add_attend": (I32, (P, I32, I32, P)),
    "rl_add_bidirectional_attend": (I32, (P, I32, P)),
    "rl_add_short_conv": (I32, (P, I64, I32, I32, P, P)),
    "rl_add_delta_project": (I32, (P, I32, *[P] * 6)),
    "rl_add_gated_delta": (I32, (P, I64, *[P] * 6)),
    "rl_add_selective_scan": (I32, (P, I64, *[P] * 8)),
    "rl_add_gate_heads": (I32, (P, I32, P)),
    "rl_add_out_project": (I32, (P, P)),
    "rl_add_mlp": (I32, (P, I32, I32, P, P, P, P, P)),
    "rl_add_gate_up": (I32, (P, I32, P, P, P)),
    "rl_add_xielu": (I32, (P, P, I32)),
    "rl_add_down": (I32, (P, I32, P, I32, P)),
    "rl_set_group": (None, (P, P)),
    "rl_add_gather": (I32, (P, I32, P, I32)),
    "rl_add_gather_tokens": (I32, (P, P, I32)),
    "rl_add_gather_ranges": (I32, (P, I32, I32)),
    "rl_set_gather_logits": (None, (P, P)),
    "rl_add_moe": (I32, (P, I32, I32, *[P] * 9)),
    "rl_add_add_shared": (I32, (P,)),
    "rl_add_residual": (I32, (P, F32)),
    "rl_add_layer_embed": (I32, (P, P, P, P, P, I32)),
    "rl_add_layer_input": (I32, (P, P, P, P, I32)),
    "rl_add_split_streams": (I32, (P, P, I32)),
    "rl_add_join_streams": (I32, (P, P, I32)),
    "rl_add_add_to_streams": (I32, (P, I32)),
    "rl_add_predict_streams": (I32, (P, P, P, P, P)),
    "rl_add_correct_streams": (I32, (P, P, P, P, P, P)),
    "rl_add_add_laurel": (I32, (P,)),
    "rl_add_sparse_gate_up": (I32, (P, I32, P, P, P, F32)),
    "rl_add_scale_hidden": (I32, (P, P)),
    "rl_add_latent_project": (I32, (P, I32, P, P, P, P, P, I32, P)),
    "rl_add_latent_attend": (I32, (P, I32, I32, P, P, P, I32, I32)),
    "rl_add_rope_table": (I32, (P, P, I32, F32)),
    "rl_set_head": (None, (P, P, F32, F32)),
    "rl_reserve": (I32, (P, I32)),
    "rl_buffer": (P, (P, I32)),
    "rl_state_inputs": (I64, (P,)),
    "rl_take_experts_read": (I64, (P,)),
    "rl_expert_tokens": (None, (P, I32, P)),
    "rl_run": (I32, (P, P, I32, I32, P, P, P, P)),
    "rl_head": (I32, (P, P, P, I32, P)),
    "rl_sample": (I32, (P, P, I32, I32, P)),
    "rl_decode": (I32, (P, P, P, P, P, P, I32, P, P)),
}

# Those whose negative result says that there is no memory, and whose callers do not ask.
RAISING = frozenset(
    {"rl_record", "rl_pack", "rl_matmul", "rl_kv_move", "rl_sample"}
    | {name for name in FUNCTIONS if name.startswith("rl_add_")}
)
