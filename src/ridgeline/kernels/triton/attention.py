"""Attention over the paged KV cache: prompts with prefix context, and decode with split KV.

Shapes: T rows of queries, S sequences, H heads, d and v widths of a head of K and of V, R block
tables of P entries.
"""

from dataclasses import dataclass

import torch

from ridgeline.core.rounding import ceil_div
from ridgeline.kernels.triton.attention_kernel import attention_kernel
from ridgeline.kernels.triton.kv_cache import QUANTIZED, KVTensors
from ridgeline.kernels.triton.launch import device_limits, next_power_of_2, num_multiprocessors
from ridgeline.kernels.triton.workspace import Workspace

MAX_TREE_DRAFTS = 64
_PROGRAMS_EACH = 3  # of decode, that are on a multiprocessor at once
_CODE_PROGRAMS_EACH = 2  # the same with KV in codes, which takes more registers
_MERGED_FLOATS = 2048  # of one split at once
_SPLIT_TOKENS = 64
_LARGE_BYTES = 128 << 10  # of shared memory: with less, programs have fewer rows of wide heads
_OTHER_BYTES = 67 << 10  # of shared memory that is not for tiles of K and V on their way


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMask:
    """Draft trees: ``num_drafts_S`` int32 (0: none, or an ordinary chain), ``ancestors_T`` int64
    (bit j: the row sees draft j; its own bit is set) and ``positions_T`` int32.

    A tree has at most `MAX_TREE_DRAFTS` drafts.
    """

    num_drafts_S: torch.Tensor
    ancestors_T: torch.Tensor
    positions_T: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Which rows of queries belong to which sequence, and where its KV lies.

    Rows ``[query_starts[s], query_starts[s + 1])`` are the last of the ``kv_lengths[s]`` slots of
    sequence s; a length of 0 skips it. Its block table is row ``table_rows[s]`` (int64) of
    ``block_tables_RP``, which like the others is int32 on the device. ``num_query_tokens`` is how
    many rows there are at most, known on the host.
    """

    query_starts_S1: torch.Tensor
    kv_lengths_S: torch.Tensor
    block_tables_RP: torch.Tensor
    table_rows_S: torch.Tensor
    num_query_tokens: int
    tree: TreeMask | None = None


def attend_decode(
    q_THd: torch.Tensor,
    kv: KVTensors,
    out_THv: torch.Tensor,
    batch: AttentionBatch,
    *,
    max_query_tokens: int,
    scale: float,
    workspace: Workspace,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Attention of a few rows of each sequence, at most ``max_query_tokens``, one or with drafts.

    Slots of all sequences are divided over programs so that the whole device reads; the last one
    of a sequence merges. How they are divided depends on the shapes of the batch and on lengths.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    shape = _Shape.of(q_THd, kv, out_THv, batch)
    most_tokens = next_power_of_2(max_query_tokens)  # few kernels for all lengths of drafts
    precise = q_THd.dtype == torch.float32
    most_bytes = device_limits(q_THd.device).shared_bytes
    most_rows = 64
    if shape.wide:  # registers, or shared memory, do not suffice for as many
        most_rows = 16 if precise else (32 if most_bytes < _LARGE_BYTES else 64)
    block_m = min(max(16, next_power_of_2(most_tokens * shape.group)), most_rows)
    heads_each = min(shape.group, block_m)
    block_q = min(most_tokens, block_m // heads_each)
    work = shape.kv_heads * ceil_div(shape.group, heads_each) * ceil_div(max_query_tokens, block_q)
    num_sequences = len(batch.kv_lengths_S)
    each = 1 if shape.wide else (_CODE_PROGRAMS_EACH if shape.kv_bytes == 1 else _PROGRAMS_EACH)
    programs = num_multiprocessors(q_THd.device) * each
    block_v = max(16, next_power_of_2(shape.v_width))
    # What is stored is parts of split sequences alone, each of which is longer than an even part.
    room = len(workspace.floats) // (2 * work * block_m * (block_v + 2))
    num_parts = min(ceil_div(programs, work), room)
    is_split = num_parts > 1 and num_sequences * work <= len(workspace.counters)
    merged_rows = min(next_power_of_2(heads_each * block_q), max(1, _MERGED_FLOATS // block_v))
    block_n = 128 if shape.kv_bytes == 1 else 64
    if precise:  # tiles of codes are there as floats as well
        block_n = 16 if shape.wide or shape.kv_bytes == 1 else 32
    elif shape.wide:
        block_n = 32
    _launch(
        (num_sequences + (num_parts if is_split else 0), work),
        (q_THd, kv, out_THv, batch, shape),
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
        workspace=workspace,
        num_parts=num_parts,
        most_queries=max_query_tokens,
        HEADS_EACH=heads_each,
        BLOCK_Q=block_q,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SPLIT=is_split,
        SPLIT_TOKENS=max(_SPLIT_TOKENS, block_n),
        MERGED_ROWS=merged_rows,
        RAGGED=False,
        num_warps=8 if precise or (shape.wide and block_m > 32) else 4,
        num_stages=_stages(shape, block_m, block_n, most_bytes),
    )


def attend_prefill(
    q_THd: torch.Tensor,
    kv: KVTensors,
    out_THv: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Attention of prompts, or parts of them, after what is cached of their sequences.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    shape = _Shape.of(q_THd, kv, out_THv, batch)
    precise = q_THd.dtype == torch.float32
    most_bytes = device_limits(q_THd.device).shared_bytes
    block_m = 64 if shape.wide else 128
    if most_bytes < _LARGE_BYTES and shape.d_width > 128:
        block_m //= 2
    if precise:
        block_m = 16 if shape.wide or shape.kv_bytes == 1 else 32
    block_n = 32 if shape.d_width > 128 else (64 if shape.d_width > 64 else 128)
    block_n = 16 if precise else (32 if shape.wide else block_n)
    heads_each = min(shape.group, block_m)
    block_q = block_m // heads_each
    blocks = batch.num_query_tokens // block_q + len(batch.kv_lengths_S)
    _launch(
        (blocks, shape.kv_heads * ceil_div(shape.group, heads_each)),
        (q_THd, kv, out_THv, batch, shape),
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
        workspace=None,
        HEADS_EACH=heads_each,
        BLOCK_Q=block_q,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SPLIT=False,
        SPLIT_TOKENS=block_n,
        MERGED_ROWS=1,
        RAGGED=True,
        num_warps=8,
        num_stages=_stages(shape, block_m, block_n, most_bytes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Widths and counts that decide how a kernel is compiled."""

    kv_heads: int
    group: int
    d_width: int  # of K without the rotary part of latents
    rope_width: int
    v_width: int
    kv_bytes: int
    is_latent: bool

    @property
    def wide(self) -> bool:
        """Whether one row's output takes so many registers that a program has few rows."""
        return self.v_width > 256

    @classmethod
    def of(
        cls, q_THd: torch.Tensor, kv: KVTensors, out_THv: torch.Tensor, batch: AttentionBatch
    ) -> "_Shape":
        num_heads, width = q_THd.shape[1:]
        kv_heads, v_width = kv.k.shape[1], kv.v.shape[-1]
        if kv.k.shape[-1] != width or num_heads % kv_heads:
            raise ValueError(f"q {list(q_THd.shape)} does not fit K {list(kv.k.shape)}")
        if out_THv.shape[1:] != (num_heads, v_width):
            raise ValueError(f"out {list(out_THv.shape)} does not fit {num_heads} heads of V")
        if (kv.k.dtype in QUANTIZED) != (kv.k_scales is not None):
            raise ValueError(
                f"{kv.k.dtype} KV {'needs' if kv.k_scales is None else 'has no'} scales"
            )
        if kv.k.dtype not in QUANTIZED and kv.k.dtype != q_THd.dtype:
            raise ValueError(f"q is {q_THd.dtype} and KV {kv.k.dtype}")
        if len(batch.query_starts_S1) != len(batch.kv_lengths_S) + 1:
            raise ValueError("query_starts has one more entry than kv_lengths")
        return cls(
            kv_heads=kv_heads,
            group=num_heads // kv_heads,
            d_width=v_width if kv.is_latent else width,
            rope_width=width - v_width if kv.is_latent else 0,
            v_width=v_width,
            kv_bytes=kv.k.element_size(),
            is_latent=kv.is_latent,
        )


def _stages(shape: _Shape, block_m: int, block_n: int, most_bytes: int) -> int:
    """Stages of the compiler's pipeline at which two tiles of K and V are on their way, where
    shared memory has room for them and for the one that is multiplied; else one.

    Blocks are looked up before tiles are loaded, and the compiler gives half of the stages to each
    of such loads.
    """
    widths = shape.d_width + shape.rope_width + (0 if shape.is_latent else shape.v_width)
    in_use = 2 if block_m >= 64 else 1  # products of whole warp groups are waited for a turn later
    tiles = (most_bytes - _OTHER_BYTES) // (widths * block_n * shape.kv_bytes)
    return 2 * max(1, min(2, tiles - in_use)) + 1


def _launch(
    grid: tuple[int, int],
    tensors: tuple[torch.Tensor, KVTensors, torch.Tensor, AttentionBatch, _Shape],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
    workspace: Workspace | None,
    num_parts: int = 1,
    most_queries: int = 1,
    **meta: int | bool,
) -> None:
    q, kv, out, batch, shape = tensors
    unused = q  # stands for pointers that the compiled kernel does not read
    tree = batch.tree
    k_scales = kv.k_scales
    attention_kernel[grid](
        q,
        out,
        kv.k,
        kv.v,
        unused if k_scales is None else k_scales,
        unused if kv.v_scales is None else kv.v_scales,
        batch.block_tables_RP,
        batch.table_rows_S,
        batch.query_starts_S1,
        batch.kv_lengths_S,
        batch.kv_lengths_S if tree is None else tree.num_drafts_S,
        batch.kv_lengths_S if tree is None else tree.ancestors_T,
        batch.kv_lengths_S if tree is None else tree.positions_T,
        unused if sinks_H is None else sinks_H,
        unused if workspace is None else workspace.floats,
        unused if workspace is None else workspace.counters,
        len(batch.kv_lengths_S),
        num_parts,
        most_queries,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        kv.k.stride(0),
        kv.k.stride(1),
        kv.k.stride(2),
        kv.v.stride(0),
        kv.v.stride(1),
        kv.v.stride(2),
        0 if k_scales is None else k_scales.stride(0),
        0 if k_scales is None else k_scales.stride(1),
        batch.block_tables_RP.stride(0),
        scale,
        0.0 if softcap is None else softcap,
        KV_HEADS=shape.kv_heads,
        GROUP=shape.group,
        HAS_SINKS=sinks_H is not None,
        D=shape.d_width,
        V=shape.v_width,
        R=shape.rope_width,
        PAGE=kv.block_tokens,
        BLOCK_D=max(16, next_power_of_2(shape.d_width)),
        BLOCK_V=max(16, next_power_of_2(shape.v_width)),
        BLOCK_R=max(16, next_power_of_2(shape.rope_width)),
        WINDOW=0 if window is None else window,
        HAS_SOFTCAP=softcap is not None,
        QUANTIZED=k_scales is not None,
        # Codes that are expanded into K's layout would go through shared memory into V's.
        LATENT=shape.is_latent and k_scales is None,
        TREE=tree is not None,
        **meta,
    )
