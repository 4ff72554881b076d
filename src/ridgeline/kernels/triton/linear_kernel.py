"""The matrix product of small batches: memory-bound, weights read once and expanded in registers.

A program has BLOCK_O rows of weights and BLOCK_T tokens, and computes the transposed product
W · xᵀ: weights are then the operand that tensor cores take from registers. Columns are split over
SPLITS programs, of which the one that ends last adds up what the others stored, in order.
"""

import triton
import triton.language as tl

from ridgeline.kernels.triton.activation import gated
from ridgeline.kernels.triton.weight_tiles import (
    INT4,
    expand_codes,
    load_codes,
    load_factors,
    shrunk,
)


@triton.jit(do_not_specialize=["num_tokens"])  # or every size of a batch would be compiled
def linear_kernel(
    x,
    codes,
    scales,
    zeros,
    out,
    bias,
    residual,
    pairs,
    pair_weights,
    block_experts,
    num_blocks,
    partials,
    counters,
    num_tokens,
    num_outputs,
    num_columns,
    columns_each,
    x_stride,
    code_stride,
    scale_stride,
    out_stride,
    residual_stride,
    up_offset,
    code_expert_stride,
    scale_expert_stride,
    bias_expert_stride,
    residual_scale,
    alpha,
    limit,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    GROUPED: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """GATED: row o of the gate and row num_outputs + o of the other branch make output o.

    GROUPED: a block of tokens is a block of pairs (token, expert) of one expert, whose input is row
    pair // PAIRS_PER_ROW and whose output row is the pair's. ACTIVATION −1 is none.
    """
    block_t = tl.program_id(1)
    split = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    rows_valid = rows < num_outputs
    tokens = block_t * BLOCK_T + tl.arange(0, BLOCK_T)
    tokens_valid = tokens < num_tokens
    x_rows = tokens
    if GROUPED:
        if block_t >= tl.load(num_blocks):
            return
        expert = tl.load(block_experts + block_t).to(tl.int64)
        tokens = tl.load(pairs + tokens)
        tokens_valid = tokens < num_tokens  # the rest of a block holds num_tokens
        x_rows = tokens // PAIRS_PER_ROW
        codes += expert * code_expert_stride
        scales += expert * scale_expert_stride
        zeros += expert * scale_expert_stride
        bias += expert * bias_expert_stride
    x_rows = x_rows.to(tl.int64) * x_stride

    PER_CODE: tl.constexpr = 8 if FORMAT == INT4 else 1  # weights; int4 comes in words
    STRIDE_OF: tl.constexpr = STEP // PER_CODE if FORMAT == INT4 else 1
    x_type = x.dtype.element_ty
    SHRUNK: tl.constexpr = shrunk(FORMAT, x_type)
    inner = tl.arange(0, STEP)
    inner_codes = tl.arange(0, STEP // PER_CODE)
    # What is a whole number of steps is multiplied by one, for the compiler to see it.
    code_rows = codes + rows.to(tl.int64) * (code_stride // STRIDE_OF * STRIDE_OF)
    up_rows = code_rows + up_offset
    acc = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    acc_up = acc
    up_rows_O = num_outputs + rows
    row_zeros = rows
    row_up_zeros = rows
    if HAS_ZEROS and (GROUP == 0):
        row_zeros = tl.load(zeros + rows, mask=rows_valid, other=0)
        if GATED:
            row_up_zeros = tl.load(zeros + up_rows_O, mask=rows_valid, other=0)
    first = split * columns_each
    last = tl.minimum(first + columns_each, num_columns)
    for begin in tl.range(first, last, BLOCK_K):
        for offset in tl.static_range(0, BLOCK_K, STEP):
            column = begin + offset
            codes_at = column // STEP * (STEP // PER_CODE) + inner_codes
            codes_OK = load_codes(
                code_rows, rows_valid, codes_at, num_columns // PER_CODE, FORMAT, EVEN
            )
            if GATED:
                up_OK = load_codes(
                    up_rows, rows_valid, codes_at, num_columns // PER_CODE, FORMAT, EVEN
                )
            scales_OK, zeros_OK = load_factors(
                scales, zeros, row_zeros, rows, rows_valid, column, num_columns, scale_stride,
                GROUP, STEP, HAS_ZEROS,
            )  # fmt: skip
            if GATED:
                up_scales_OK, up_zeros_OK = load_factors(
                    scales, zeros, row_up_zeros, up_rows_O, rows_valid, column, num_columns,
                    scale_stride, GROUP, STEP, HAS_ZEROS,
                )  # fmt: skip
            at = column + inner
            x_valid = tokens_valid[None, :]
            if not EVEN:
                x_valid = x_valid & (at < num_columns)[:, None]
            x_KT = tl.load(x + x_rows[None, :] + at[:, None], mask=x_valid, other=0.0)
            values = expand_codes(codes_OK, zeros_OK, FORMAT, HAS_ZEROS, x_type)
            if GROUP > 0:
                values *= scales_OK.to(x_type) * SHRUNK
            acc = tl.dot(values, x_KT, acc, input_precision="ieee")
            if GATED:
                values = expand_codes(up_OK, up_zeros_OK, FORMAT, HAS_ZEROS, x_type)
                if GROUP > 0:
                    values *= up_scales_OK.to(x_type) * SHRUNK
                acc_up = tl.dot(values, x_KT, acc_up, input_precision="ieee")
    if GROUP == 0:
        acc *= SHRUNK
        acc_up *= SHRUNK

    if SPLITS > 1:
        reduction = block_t * tl.num_programs(0) + tl.program_id(0)
        TILE: tl.constexpr = BLOCK_O * BLOCK_T
        FLOATS: tl.constexpr = 2 * TILE
        parts = partials + (reduction * SPLITS).to(tl.int64) * FLOATS
        lanes = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        tl.store(parts + split * FLOATS + lanes, acc)
        if GATED:
            tl.store(parts + split * FLOATS + TILE + lanes, acc_up)
        tl.debug_barrier()  # all threads have stored before one of them says so
        arrived = tl.atomic_add(counters + reduction, 1, sem="acq_rel")
        if arrived != SPLITS - 1:
            return
        tl.store(counters + reduction, 0)
        acc = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
        acc_up = acc
        for part in tl.static_range(SPLITS):
            stored = parts + part * FLOATS
            acc += tl.load(stored + lanes, cache_modifier=".cg")
            if GATED:
                acc_up += tl.load(stored + TILE + lanes, cache_modifier=".cg")

    acc = _scaled(acc, scales + rows, bias + rows, rows_valid, FORMAT, GROUP, HAS_BIAS)
    if GATED:
        acc_up = _scaled(
            acc_up, scales + up_rows_O, bias + up_rows_O, rows_valid, FORMAT, GROUP, HAS_BIAS
        )
        acc = gated(acc, acc_up, alpha, limit, ACTIVATION)
    inside = rows_valid[:, None] & tokens_valid[None, :]
    if WEIGHTED:
        acc *= tl.load(pair_weights + tokens, mask=tokens_valid, other=0.0)[None, :]
    if HAS_RESIDUAL:
        before = residual + tokens.to(tl.int64)[None, :] * residual_stride + rows[:, None]
        acc = tl.load(before, mask=inside, other=0.0).to(tl.float32) + acc * residual_scale
    target = out + tokens.to(tl.int64)[None, :] * out_stride + rows[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scaled(
    acc_OT,
    scales_O,
    bias_O,
    rows_valid_O,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Whole rows' scales, and the bias."""
    if (FORMAT != 0) and (GROUP == 0):
        acc_OT *= tl.load(scales_O, mask=rows_valid_O, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        acc_OT += tl.load(bias_O, mask=rows_valid_O, other=0.0).to(tl.float32)[:, None]
    return acc_OT
