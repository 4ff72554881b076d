"""The inner loop of attention: some rows of queries over a range of KV slots.

Online softmax in base 2 (Milakov and Gimelshein 2018; FlashAttention, arXiv 2205.14135). Rows M
are (query token, head) pairs of one KV head, so that K and V are read once for the whole group.
"""

import triton
import triton.language as tl

from ridgeline.kernels.triton.weight_tiles import numbers

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_slots(
    acc_MV,
    top_M,
    total_M,
    q_MD,
    q_MR,
    first,
    last,
    kv_length,
    row_slots_M,
    row_positions_M,
    row_bits_M,
    first_draft,
    draft_positions,
    table,
    k,
    v,
    k_scales,
    v_scales,
    k_block_stride,
    k_token_stride,
    v_block_stride,
    v_token_stride,
    scale_block_stride,
    scale,
    softcap,
    D: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LATENT: tl.constexpr,
    TREE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Slots [first, last), first a multiple of BLOCK_N, added to the running output, max and sum.

    D is what of a head q_MD covers, R what q_MR does (latents' rotary part). Without MASKED every
    row sees every slot.
    """
    columns = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    for start in tl.range(first, last, BLOCK_N):
        slots = start + columns
        valid = slots < kv_length
        if PAGE % BLOCK_N == 0:
            blocks = tl.load(table + start // PAGE).to(tl.int64)
            offsets = start % PAGE + columns
        else:
            if MASKED:
                blocks = tl.load(table + slots // PAGE, mask=valid, other=0).to(tl.int64)
            else:
                blocks = tl.load(table + slots // PAGE).to(tl.int64)
            offsets = slots % PAGE
        k_rows = k + blocks * k_block_stride + offsets * k_token_stride
        k_DN = _load(
            k_rows[None, :] + d[:, None], d[:, None] < D, valid[None, :], D, BLOCK_D, MASKED
        )
        k_DN = numbers(k_DN, q_MD.dtype)
        scores = tl.dot(q_MD, k_DN, input_precision="ieee")
        if R > 0:
            r = tl.arange(0, BLOCK_R)
            k_RN = _load(
                k_rows[None, :] + D + r[:, None], r[:, None] < R, valid[None, :], R, BLOCK_R, MASKED
            )
            scores = tl.dot(q_MR, numbers(k_RN, q_MR.dtype), scores, input_precision="ieee")
        if QUANTIZED:
            scale_offsets = blocks * scale_block_stride + offsets
            k_scales_N = tl.load(k_scales + scale_offsets, mask=valid, other=0.0)
            scores *= k_scales_N[None, :]
        if HAS_SOFTCAP:
            scores = softcap * _tanh(scores * (scale / softcap)) * LOG2E
        else:
            scores *= scale * LOG2E
        if MASKED:
            seen = slots[None, :] <= row_slots_M[:, None]
            positions = slots
            if TREE:
                draft = slots - first_draft
                bit = tl.minimum(tl.maximum(draft, 0), 63).to(tl.int64)
                on_path = ((row_bits_M[:, None] >> bit[None, :]) & 1) == 1
                seen = tl.where(draft[None, :] >= 0, on_path, seen)
                if WINDOW > 0:
                    drafted = (draft >= 0) & valid
                    depth = tl.load(draft_positions + draft, mask=drafted, other=0)
                    positions = tl.where(drafted, depth, slots)
            if WINDOW > 0:
                seen = seen & (row_positions_M[:, None] - positions[None, :] < WINDOW)
            scores = tl.where(seen & valid[None, :], scores, float("-inf"))
        new_top_M = tl.maximum(top_M, tl.max(scores, 1))
        if MASKED:  # rows that have seen nothing yet: −inf − −inf is not a number
            base_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
        else:
            base_M = new_top_M
        weights = tl.exp2(scores - base_M[:, None])
        decay_M = tl.exp2(top_M - base_M)
        total_M = total_M * decay_M + tl.sum(weights, 1)
        acc_MV = acc_MV * decay_M[:, None]
        if LATENT:
            v_NV = tl.trans(k_DN)
        else:
            v_rows = v + blocks * v_block_stride + offsets * v_token_stride
            v_NV = _load(
                v_rows[:, None] + dv[None, :], dv[None, :] < V, valid[:, None], V, BLOCK_V, MASKED
            )
            v_NV = numbers(v_NV, q_MD.dtype)
        if QUANTIZED:
            if LATENT:
                weights *= k_scales_N[None, :]
            else:
                v_scales_N = tl.load(v_scales + scale_offsets, mask=valid, other=0.0)
                weights *= v_scales_N[None, :]
        acc_MV = tl.dot(weights.to(v_NV.dtype), v_NV, acc_MV, input_precision="ieee")
        top_M = new_top_M
    return acc_MV, top_M, total_M


@triton.jit
def _load(
    pointers, in_width, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """A tile of K or V; zero outside of the head's width and of the sequence."""
    if MASKED:
        if WIDTH == BLOCK:
            tile = tl.load(pointers, mask=valid, other=0.0)
        else:
            tile = tl.load(pointers, mask=valid & in_width, other=0.0)
    elif WIDTH == BLOCK:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=in_width, other=0.0)
    return tile


@triton.jit
def _tanh(x):
    return 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))
