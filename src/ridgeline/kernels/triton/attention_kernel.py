"""The attention kernel: rows of queries of one sequence against its paged KV.

A program has up to BLOCK_M rows, (query token, head) pairs of one KV head. Prompts: one program per
block of query tokens of any sequence. Decode: the slots of long sequences are split over programs
(Flash-Decoding, Dao et al. 2023), and the one that ends last merges what they stored, in order.
Lengths are known on the device alone, so each program finds its part of the batch by itself.
"""

import triton
import triton.language as tl

from ridgeline.kernels.triton.attention_tiles import LOG2E, attend_slots

MOST_SPLITS = tl.constexpr(64)  # of one sequence
MERGED_FLOATS = tl.constexpr(8192)  # that are on their way at once: 64 registers of a thread
_CHUNK = tl.constexpr(128)  # sequences that are looked at together


# What changes from step to step is no reason to compile again: counts, and tables of a part of a
# batch, which begin anywhere.
@triton.jit(
    do_not_specialize=["num_sequences", "table_stride", "num_parts", "most_queries"],
    do_not_specialize_on_alignment=[
        "tables", "table_rows", "query_starts", "kv_lengths", "num_drafts", "ancestors",
        "positions",
    ],
)  # fmt: skip
def attention_kernel(
    q,
    out,
    k,
    v,
    k_scales,
    v_scales,
    tables,
    table_rows,
    query_starts,
    kv_lengths,
    num_drafts,
    ancestors,
    positions,
    sinks,
    partials,
    counters,
    num_sequences,
    num_parts,
    most_queries,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    k_block_stride,
    k_head_stride,
    k_token_stride,
    v_block_stride,
    v_head_stride,
    v_token_stride,
    scale_block_stride,
    scale_head_stride,
    table_stride,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS_EACH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LATENT: tl.constexpr,
    TREE: tl.constexpr,
):
    """Heads of a group are taken HEADS_EACH at a time, query tokens BLOCK_Q at a time.

    RAGGED: program axis 0 counts blocks of query tokens over all sequences. Otherwise it counts
    sequences, and axis 1 goes over their blocks of query tokens as well as over heads. With SPLIT,
    axis 0 counts the parts of all sequences, of which there are up to num_sequences more than
    num_parts. A part is SPLIT_TOKENS slots or more.
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS_EACH - 1) // HEADS_EACH
    work = tl.program_id(1)
    kv_head = work // HEAD_BLOCKS % KV_HEADS
    if RAGGED:
        block = tl.num_programs(0) - 1 - tl.program_id(0)  # those with most context come first
        sequence = _sequence_of(query_starts, block, num_sequences, BLOCK_Q)
        query_start = tl.load(query_starts + sequence)
        query_block = block - sequence - (query_start - tl.load(query_starts)) // BLOCK_Q
    else:
        split, tokens_each, stored = 0, 0, 0
        sequence = tl.program_id(0)
        if SPLIT:
            sequence, split, tokens_each, stored = _part_of(
                kv_lengths, tl.program_id(0), num_sequences, num_parts, most_queries,
                SPLIT_TOKENS, BLOCK_N, WINDOW,
            )  # fmt: skip
            if sequence >= num_sequences:
                return
        query_start = tl.load(query_starts + sequence)
        query_block = work // (HEAD_BLOCKS * KV_HEADS)
    num_queries = tl.load(query_starts + sequence + 1) - query_start
    kv_length = tl.load(kv_lengths + sequence)
    table_row = tl.load(table_rows + sequence)  # here, so that it is waited for with the others
    first_token = query_block * BLOCK_Q
    if first_token >= num_queries or kv_length == 0:
        return

    rows = tl.arange(0, BLOCK_M)
    tokens = first_token + rows // HEADS_EACH
    group_heads = work % HEAD_BLOCKS * HEADS_EACH + rows % HEADS_EACH
    real = (rows < BLOCK_Q * HEADS_EACH) & (tokens < num_queries) & (group_heads < GROUP)
    heads = kv_head * GROUP + group_heads
    token_rows = (query_start + tokens).to(tl.int64)
    slots = kv_length - num_queries + tokens
    row_slots = tl.where(real, slots, -1)

    first_slot = kv_length - num_queries + first_token
    last_slot = tl.minimum(first_slot + BLOCK_Q, kv_length) - 1
    lowest_position = first_slot
    row_positions = row_slots
    row_bits = rows.to(tl.int64)
    first_draft = kv_length
    if TREE:
        first_draft = kv_length - tl.load(num_drafts + sequence)
        row_bits = tl.load(ancestors + token_rows, mask=real, other=0)
        row_positions = tl.load(positions + token_rows, mask=real, other=-1)
        lowest_position = tl.min(tl.where(real, row_positions, 2147483647), 0)

    # What some row sees is [low, high), what all rows see [all_low, all_high).
    high = last_slot + 1
    low = 0
    all_low = 0
    if WINDOW > 0:
        low = tl.maximum(lowest_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        all_low = tl.cdiv(tl.maximum(last_slot - WINDOW + 1, 0), BLOCK_N) * BLOCK_N
    all_high = tl.minimum(first_slot + 1, first_draft) // BLOCK_N * BLOCK_N
    num_splits = 1
    if SPLIT:
        num_splits = tl.cdiv(high - low, tokens_each)
        if split >= num_splits:
            return
        low = low + split * tokens_each
        high = tl.minimum(high, low + tokens_each)

    d = tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R)
    dv = tl.arange(0, BLOCK_V)
    q_rows = q + token_rows * q_token_stride + heads * q_head_stride
    q_MD = tl.load(q_rows[:, None] + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)
    q_MR = q_MD
    if R > 0:
        q_MR = tl.load(
            q_rows[:, None] + D + r[None, :], mask=real[:, None] & (r[None, :] < R), other=0.0
        )
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    table = tables + table_row * table_stride
    k += kv_head * k_head_stride
    v += kv_head * v_head_stride
    k_scales += kv_head * scale_head_stride
    v_scales += kv_head * scale_head_stride
    draft_positions = positions + query_start + num_queries - (kv_length - first_draft)

    # Prompts: masks only where they differ between rows. Decode reads few slots and waits for them;
    # rows of wide heads have no registers to spare for three loops.
    PHASES: tl.constexpr = 3 if (RAGGED and V <= 256) else 1
    for phase in tl.static_range(PHASES):
        begin = low
        end = high
        if PHASES == 3:
            if phase == 0:
                end = tl.minimum(all_low, high)
            elif phase == 1:
                begin = tl.maximum(all_low, low)
                end = all_high
            else:
                begin = tl.maximum(tl.maximum(all_low, all_high), low)
        if (phase != 0 or PHASES == 1) or WINDOW > 0:
            acc, top, total = attend_slots(
                acc,
                top,
                total,
                q_MD,
                q_MR,
                begin,
                end,
                kv_length,
                row_slots,
                row_positions,
                row_bits,
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
                D,
                V,
                R,
                PAGE,
                BLOCK_N,
                BLOCK_D,
                BLOCK_V,
                BLOCK_R,
                WINDOW,
                HAS_SOFTCAP,
                QUANTIZED,
                LATENT,
                TREE,
                phase != 1,
            )

    sink_rows = sinks + heads
    out_rows = out + token_rows * out_token_stride + heads * out_head_stride
    in_out = real[:, None] & (dv[None, :] < V)
    if SPLIT:  # noqa: SIM102  (known to the compiler)
        if num_splits > 1:
            reduction = sequence * tl.num_programs(1) + work
            FLOATS: tl.constexpr = BLOCK_M * (BLOCK_V + 2)
            parts = partials + (stored * tl.num_programs(1) + work) * FLOATS
            part_stride = tl.num_programs(1) * FLOATS
            part = parts + split * part_stride
            tl.store(part + rows[:, None] * BLOCK_V + dv[None, :], acc, mask=real[:, None])
            tl.store(part + BLOCK_M * BLOCK_V + rows, top, mask=real)
            tl.store(part + BLOCK_M * (BLOCK_V + 1) + rows, total, mask=real)
            tl.debug_barrier()  # all threads have stored before one of them says so
            arrived = tl.atomic_add(counters + reduction, 1, sem="acq_rel")
            if arrived == num_splits - 1:
                tl.store(counters + reduction, 0)
                _merge(
                    parts,
                    part_stride,
                    num_splits,
                    out,
                    out_token_stride,
                    out_head_stride,
                    query_start + first_token,
                    tl.minimum(num_queries - first_token, BLOCK_Q),
                    kv_head * GROUP + work % HEAD_BLOCKS * HEADS_EACH,
                    tl.minimum(GROUP - work % HEAD_BLOCKS * HEADS_EACH, HEADS_EACH),
                    sinks,
                    HEADS_EACH,
                    HAS_SINKS,
                    V,
                    BLOCK_M,
                    BLOCK_V,
                    MERGED_ROWS,
                )
            return
    acc = _finish(acc, top, total, sink_rows, real, HAS_SINKS)
    tl.store(out_rows[:, None] + dv[None, :], acc.to(out.dtype.element_ty), mask=in_out)


@triton.jit
def _part_of(
    kv_lengths,
    part,
    num_sequences,
    num_parts,
    most_queries,
    SPLIT_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The sequence of a part, which of its parts it is, their slots, and how many parts of split
    sequences come before its first. Beyond all parts the sequence is ``num_sequences``.

    All slots that are read are divided evenly into ``num_parts``, but for a sequence's last part.
    """
    lanes = tl.arange(0, _CHUNK)
    slots = tl.zeros((), tl.int64)
    for first in tl.range(0, num_sequences, _CHUNK):
        spans = _spans(kv_lengths, first + lanes, num_sequences, most_queries, BLOCK_N, WINDOW)
        slots += tl.sum(spans.to(tl.int64), 0)
    each = tl.maximum(tl.cdiv(tl.cdiv(slots, num_parts), BLOCK_N) * BLOCK_N, SPLIT_TOKENS)
    each = each.to(tl.int32)
    sequence = 0
    counted = 0
    before = 0  # parts of the sequences before it
    stored = 0
    length = 0
    for first in tl.range(0, num_sequences, _CHUNK):
        indices = first + lanes
        spans = _spans(kv_lengths, indices, num_sequences, most_queries, BLOCK_N, WINDOW)
        splits = tl.cdiv(spans, _tokens_each(spans, each, BLOCK_N))
        splits = tl.where(indices < num_sequences, tl.maximum(splits, 1), 0)
        ends = counted + tl.cumsum(splits, 0)
        counted += tl.sum(splits, 0)
        is_before = (ends <= part) & (indices < num_sequences)
        is_own = (ends > part) & (ends - splits <= part)
        sequence += tl.sum(is_before.to(tl.int32), 0)
        stored += tl.sum(tl.where(is_before & (splits > 1), splits, 0), 0)
        length += tl.sum(tl.where(is_own, spans, 0), 0)
        before += tl.sum(tl.where(is_before, splits, 0), 0)
    return sequence, part - before, _tokens_each(length, each, BLOCK_N), stored


@triton.jit
def _spans(
    kv_lengths, sequences, num_sequences, most_queries, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """How many slots of each sequence are read, at the most."""
    lengths = tl.load(kv_lengths + sequences, mask=sequences < num_sequences, other=0)
    if WINDOW > 0:
        lengths = tl.minimum(lengths, WINDOW + most_queries + BLOCK_N)
    return lengths


@triton.jit
def _tokens_each(span, each, BLOCK_N: tl.constexpr):
    """Slots of a part of a sequence, which has MOST_SPLITS at the most."""
    return tl.maximum(each, tl.cdiv(tl.cdiv(span, MOST_SPLITS), BLOCK_N) * BLOCK_N)


@triton.jit
def _merge(
    parts,
    part_stride,
    num_splits,
    out,
    out_token_stride,
    out_head_stride,
    first_row,
    num_tokens,
    first_head,
    num_heads,
    sinks,
    HEADS_EACH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Combine the splits of each row, in order, and write the rows, many of them at once.

    What is waited for is latency: maxima and sums of all splits are loaded at once, and then the
    outputs of as many as there are registers for.
    """
    DEPTH: tl.constexpr = MERGED_FLOATS // (ROWS * BLOCK_V)
    dv = tl.arange(0, BLOCK_V)
    for first in tl.range(0, num_tokens * HEADS_EACH, ROWS):
        rows = first + tl.arange(0, ROWS)
        tokens = rows // HEADS_EACH
        heads = rows % HEADS_EACH
        real = (tokens < num_tokens) & (heads < num_heads)
        stats = parts + BLOCK_M * BLOCK_V + rows
        splits = tl.arange(0, MOST_SPLITS)
        at = stats[:, None] + splits.to(tl.int64)[None, :] * part_stride
        inside = real[:, None] & (splits < num_splits)[None, :]
        tops = tl.load(at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(at + BLOCK_M, mask=inside, other=0.0, cache_modifier=".cg")
        top = tl.max(tops, 1)
        base = tl.where(top == float("-inf"), 0.0, top)  # nothing is seen
        total = tl.sum(totals * tl.exp2(tops - base[:, None]), 1)
        acc = tl.zeros((ROWS, BLOCK_V), tl.float32)
        for first_split in tl.range(0, num_splits, DEPTH):
            for index in tl.static_range(DEPTH):
                split = first_split + index
                offset = split.to(tl.int64) * part_stride
                here = real & (split < num_splits)
                split_top = tl.load(
                    stats + offset, mask=here, other=float("-inf"), cache_modifier=".cg"
                )
                tile = tl.load(
                    parts + offset + rows[:, None] * BLOCK_V + dv[None, :],
                    mask=here[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                acc += tile * tl.exp2(split_top - base)[:, None]
        acc = _finish(acc, top, total, sinks + first_head + heads, real, HAS_SINKS)
        out_rows = out + (first_row + tokens).to(tl.int64) * out_token_stride
        out_rows += (first_head + heads) * out_head_stride
        tl.store(
            out_rows[:, None] + dv[None, :],
            acc.to(out.dtype.element_ty),
            mask=real[:, None] & (dv[None, :] < V),
        )


@triton.jit
def _finish(acc_MV, top_M, total_M, sinks_M, real_M, HAS_SINKS: tl.constexpr):
    """The softmax's division, with the sinks' share in it."""
    if HAS_SINKS:
        sink_M = tl.load(sinks_M, mask=real_M, other=0.0).to(tl.float32) * LOG2E
        base_M = tl.maximum(top_M, sink_M)
        decay_M = tl.exp2(top_M - base_M)
        acc_MV = acc_MV * decay_M[:, None]
        total_M = total_M * decay_M + tl.exp2(sink_M - base_M)
    return acc_MV / tl.where(real_M, total_M, 1.0)[:, None]


@triton.jit
def _sequence_of(query_starts, block, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence of a block of query tokens; that of s begin at block ⌊start_s / BLOCK_Q⌋ + s."""
    origin = tl.load(query_starts)
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 0, tl.int32) + num_sequences
    while low < high:
        middle = (low + high) // 2
        first = (tl.load(query_starts + middle) - origin) // BLOCK_Q + middle
        if first <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1
