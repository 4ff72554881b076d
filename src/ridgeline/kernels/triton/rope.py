"""Norms of heads, rotary positions, and the write into the KV cache, as one kernel."""

import torch
import triton
import triton.language as tl

from ridgeline.core.rounding import ceil_div
from ridgeline.core.spec import NormKind, NormSpec
from ridgeline.kernels.triton.kv_cache import QUANTIZED, KVTensors
from ridgeline.kernels.triton.launch import next_power_of_2
from ridgeline.kernels.triton.quantized_rows import scale_of, to_codes

_TILE_ELEMENTS = 2048


def rope_and_write(
    q_THd: torch.Tensor,
    k_TKd: torch.Tensor,
    v_TKd: torch.Tensor | None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    rows_T: torch.Tensor | None = None,
    kv: KVTensors,
    slots_T: torch.Tensor,
    interleaved: bool = False,
    query_start: int = 0,
    key_start: int = 0,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    norm_spec: NormSpec | None = None,
) -> None:
    """Norm and rotate the heads of q in place; norm and rotate those of k, and store k and v.

    k itself stays as it was. ``cos`` and ``sin`` are float32 ``[P, rotary_dim / 2]``, ``rows_T``
    says which of their rows each token has; elements from ``query_start`` and ``key_start`` on are
    rotated. ``slots_T`` int64 are flat slots ``block · B + offset``. ``query_norm`` and
    ``key_norm`` are ``[d]``, or a row for each head.

    Raises:
        ValueError: arguments that belong together are not all there.
    """
    if (cos is None) != (rows_T is None):
        raise ValueError("cos comes with rows_T")
    if (query_norm is None) != (norm_spec is None) or (query_norm is None) != (key_norm is None):
        raise ValueError("norms of q and of k come together, with their spec")
    num_tokens, num_heads, q_width = q_THd.shape
    kv_heads, k_width = k_TKd.shape[1:]
    v_width = 0 if v_TKd is None else v_TKd.shape[2]
    block_d = next_power_of_2(max(q_width, k_width, v_width))
    heads_each = max(1, min(_TILE_ELEMENTS // block_d, next_power_of_2(num_heads)))
    query_programs = ceil_div(num_heads, heads_each)
    key_programs = ceil_div(kv_heads, heads_each)
    value = k_TKd if v_TKd is None else v_TKd
    scales, v_scales = kv.k_scales, kv.v_scales
    _rope[(num_tokens, query_programs + key_programs)](
        q_THd,
        k_TKd,
        value,
        q_THd if cos is None else cos,
        q_THd if sin is None else sin,
        q_THd if rows_T is None else rows_T,
        q_THd if query_norm is None else query_norm,
        q_THd if key_norm is None else key_norm,
        kv.k,
        kv.v,
        q_THd if scales is None else scales,
        q_THd if v_scales is None else v_scales,
        slots_T,
        *q_THd.stride()[:2],
        *k_TKd.stride()[:2],
        *value.stride()[:2],
        *kv.k.stride()[:3],
        *kv.v.stride()[:3],
        *((0, 0) if scales is None else scales.stride()[:2]),
        0 if query_norm is None or query_norm.ndim == 1 else query_norm.stride(0),
        0 if key_norm is None or key_norm.ndim == 1 else key_norm.stride(0),
        0.0 if norm_spec is None else norm_spec.eps,
        QUERY_PROGRAMS=query_programs,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEADS_EACH=heads_each,
        Q_WIDTH=q_width,
        K_WIDTH=k_width,
        V_WIDTH=v_width,
        Q_START=query_start,
        K_START=key_start,
        HALF=0 if cos is None else cos.shape[-1],
        INTERLEAVED=interleaved,
        PAGE=kv.block_tokens,
        NORM=norm_spec is not None,
        CENTRED=norm_spec is not None and norm_spec.kind is NormKind.LAYER,
        OFFSET=1.0 if norm_spec is not None and norm_spec.unit_offset else 0.0,
        LARGEST_CODE=QUANTIZED.get(kv.k.dtype, 0.0),
        BLOCK_D=block_d,
        num_warps=4,
    )


@triton.jit
def _rope(
    q,
    k,
    v,
    cos,
    sin,
    table_rows,
    query_norm,
    key_norm,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    slots,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_cache_block_stride,
    k_cache_head_stride,
    k_cache_token_stride,
    v_cache_block_stride,
    v_cache_head_stride,
    v_cache_token_stride,
    scale_block_stride,
    scale_head_stride,
    query_norm_stride,
    key_norm_stride,
    eps,
    QUERY_PROGRAMS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_EACH: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    Q_START: tl.constexpr,
    K_START: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    OFFSET: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    table_row = token
    if HALF > 0:
        table_row = tl.load(table_rows + token).to(tl.int64)
    if part < QUERY_PROGRAMS:
        heads = part * HEADS_EACH + tl.arange(0, HEADS_EACH)
        here = (heads[:, None] < HEADS) & (d[None, :] < Q_WIDTH)
        rows = q + token * q_token_stride + heads[:, None] * q_head_stride
        queries = _turned(
            rows, here, d, query_norm + heads[:, None] * query_norm_stride, eps,
            cos + table_row * HALF, sin + table_row * HALF,
            Q_WIDTH, Q_START, HALF, INTERLEAVED, NORM, CENTRED, OFFSET,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have read their pairs before any is overwritten
        tl.store(rows + d[None, :], queries.to(q.dtype.element_ty), mask=here)
    else:
        slot = tl.load(slots + token)
        heads = (part - QUERY_PROGRAMS) * HEADS_EACH + tl.arange(0, HEADS_EACH)
        block = slot // PAGE
        offset = slot % PAGE
        here = (heads[:, None] < KV_HEADS) & (d[None, :] < K_WIDTH)
        keys = _turned(
            k + token * k_token_stride + heads[:, None] * k_head_stride, here, d,
            key_norm + heads[:, None] * key_norm_stride, eps,
            cos + table_row * HALF, sin + table_row * HALF,
            K_WIDTH, K_START, HALF, INTERLEAVED, NORM, CENTRED, OFFSET,
        )  # fmt: skip
        _store_heads(
            k_cache + block * k_cache_block_stride + offset * k_cache_token_stride,
            k_cache_head_stride,
            k_scales + block * scale_block_stride + offset,
            scale_head_stride,
            keys.to(k.dtype.element_ty), heads, d, here, KV_HEADS, LARGEST_CODE,
        )  # fmt: skip
        if V_WIDTH > 0:
            here = (heads[:, None] < KV_HEADS) & (d[None, :] < V_WIDTH)
            values = tl.load(
                v + token * v_token_stride + heads[:, None] * v_head_stride + d[None, :],
                mask=here,
                other=0.0,
            )
            _store_heads(
                v_cache + block * v_cache_block_stride + offset * v_cache_token_stride,
                v_cache_head_stride,
                v_scales + block * scale_block_stride + offset,
                scale_head_stride,
                values, heads, d, here, KV_HEADS, LARGEST_CODE,
            )  # fmt: skip


@triton.jit
def _turned(
    rows,
    here,
    d,
    weights,
    eps,
    cos_row,
    sin_row,
    WIDTH: tl.constexpr,
    START: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Heads ``[h, d]``, normed and rotated, float32. The other of each pair is read once more."""
    values = tl.load(rows + d[None, :], mask=here, other=0.0)
    dtype = values.dtype
    values = values.to(tl.float32)
    mean = tl.zeros((values.shape[0], 1), tl.float32)
    factor = mean + 1.0
    if NORM:
        if CENTRED:
            mean = (tl.sum(values, 1) / WIDTH)[:, None]
        centred = tl.where(here, values - mean, 0.0)
        factor = (1 / tl.sqrt(tl.sum(centred * centred, 1) / WIDTH + eps))[:, None]
        gains = tl.load(weights + d[None, :], mask=here, other=0.0).to(tl.float32) + OFFSET
        values = (centred * factor * gains).to(dtype).to(tl.float32)
    if HALF > 0:
        inner = d - START
        turns = (inner >= 0) & (inner < 2 * HALF)
        if INTERLEAVED:
            second = inner % 2 == 1
            other = tl.where(second, d - 1, d + 1)
            frequency = inner // 2
        else:
            second = inner >= HALF
            other = tl.where(second, d - HALF, d + HALF)
            frequency = tl.where(second, inner - HALF, inner)
        paired = here & turns[None, :]
        others = tl.load(rows + other[None, :], mask=paired, other=0.0).to(tl.float32)
        if NORM:
            gains = (
                tl.load(weights + other[None, :], mask=paired, other=0.0).to(tl.float32) + OFFSET
            )
            others = ((others - mean) * factor * gains).to(dtype).to(tl.float32)
        c = tl.load(cos_row + frequency, mask=turns, other=1.0)
        s = tl.load(sin_row + frequency, mask=turns, other=0.0)
        signed = tl.where(second, s, -s)
        values = tl.where(turns[None, :], values * c[None, :] + others * signed[None, :], values)
    return values


@triton.jit
def _store_heads(
    target,
    head_stride,
    scale_at,
    scale_head_stride,
    values,
    heads,
    d,
    here,
    KV_HEADS: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
):
    """One token's heads into the cache, as codes with a scale for each where it is quantized."""
    if LARGEST_CODE > 0:
        values = values.to(tl.float32)
        scale = scale_of(tl.max(tl.where(here, tl.abs(values), 0.0), 1), LARGEST_CODE)
        tl.store(scale_at + heads * scale_head_stride, scale, mask=heads < KV_HEADS)
        values = to_codes(values / scale[:, None], LARGEST_CODE, target.dtype.element_ty)
    tl.store(
        target + heads[:, None] * head_stride + d[None, :],
        values.to(target.dtype.element_ty),
        mask=here,
    )
