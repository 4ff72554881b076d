"""Which logits top-k and top-p leave, found without a sort.

The least logit that is kept is bracketed by two logits of the row, and the bracket halved until it
is one: what lies above its middle is counted (top-k), or its probabilities are added up (top-p).
Both ends are moved to logits that there are, so that a few passes over the row suffice.
"""

import triton
import triton.language as tl

NO_TIE = tl.constexpr(2147483647)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize_on_alignment=["slots", "temperatures", "top_ks", "top_ps"])
def truncation_kernel(
    logits,
    masks,
    slots,
    temperatures,
    top_ks,
    top_ps,
    limits,
    ties,
    vocab,
    logits_stride,
    mask_stride,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For each row the least logit that is kept and the largest; and, of the tokens that have the
    least, the last that is kept, since top-p takes equals in the order of their ids."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    logits += row.to(tl.int64) * logits_stride
    masks += row * mask_stride
    least = tl.full((), float("-inf"), tl.float32)
    largest = least
    last_tie = tl.full((), NO_TIE, tl.int32)
    if temperature > 0:
        low = tl.full((), float("inf"), tl.float32)
        for first in tl.range(0, vocab, BLOCK):
            x = _row(logits, masks, first, vocab, MASKED, BLOCK)
            largest = tl.maximum(largest, tl.max(x, 0))
            low = tl.minimum(low, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))
        inverse = (1 / temperature).to(tl.float32) * LOG2E
        some_k = (top_k > 0) & (top_k < vocab)
        if some_k & (low < largest):
            least = _bisect(
                logits, masks, low, largest, largest, inverse, top_k.to(tl.float64), vocab,
                False, MASKED, BLOCK,
            )  # fmt: skip
        if (top_p < 1) & (low < float("inf")):
            low = tl.maximum(low, least)
            total = tl.full((), 0, tl.float64)
            for first in tl.range(0, vocab, BLOCK):
                x = _row(logits, masks, first, vocab, MASKED, BLOCK)
                weights = tl.where(x >= low, tl.exp2((x - largest) * inverse), 0.0)
                total += tl.sum(weights.to(tl.float64), 0)
            wanted = total * top_p
            least = _bisect(
                logits, masks, low, largest, largest, inverse, wanted, vocab, True, MASKED, BLOCK
            )
            last_tie = _last_tie(
                logits, masks, least, largest, inverse, wanted, vocab, MASKED, BLOCK
            )
    tl.store(limits + 2 * row, least)
    tl.store(limits + 2 * row + 1, largest)
    tl.store(ties + row, last_tie)


@triton.jit
def _row(logits, masks, first, vocab, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """A part of the row in float32; −inf for what is not allowed, or not a number."""
    tokens = first + tl.arange(0, BLOCK)
    inside = tokens < vocab
    x = tl.load(logits + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    if MASKED:
        words = tl.load(masks + tokens // 32, mask=inside, other=0)
        inside = inside & (((words >> (tokens % 32)) & 1) == 1)
    return tl.where(inside & (x == x), x, float("-inf"))


@triton.jit
def _bisect(
    logits,
    masks,
    low,
    high,
    largest,
    inverse,
    wanted,
    vocab,
    MASS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least logit in [low, high] above which there are fewer than ``wanted`` (or less mass)."""
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle < high, middle, low)
        above = tl.full((), 0, tl.float64)
        next_above = high
        next_below = low
        for first in tl.range(0, vocab, BLOCK):
            x = _row(logits, masks, first, vocab, MASKED, BLOCK)
            if MASS:
                weights = tl.exp2((x - largest) * inverse).to(tl.float64)
            else:
                weights = tl.full((BLOCK,), 1, tl.float64)
            above += tl.sum(tl.where(x > middle, weights, 0.0), 0)
            next_above = tl.minimum(next_above, tl.min(tl.where(x > middle, x, high), 0))
            next_below = tl.maximum(next_below, tl.max(tl.where(x <= middle, x, low), 0))
        enough = above >= wanted
        low = tl.where(enough, next_above, low)
        high = tl.where(enough, high, next_below)
    return low


@triton.jit
def _last_tie(
    logits,
    masks,
    least,
    largest,
    inverse,
    wanted,
    vocab,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last token whose logit is ``least`` and before which there is less mass than wanted."""
    each = tl.exp2((least - largest) * inverse).to(tl.float64)
    above = tl.full((), 0, tl.float64)
    for first in tl.range(0, vocab, BLOCK):
        x = _row(logits, masks, first, vocab, MASKED, BLOCK)
        weights = tl.exp2((x - largest) * inverse).to(tl.float64)
        above += tl.sum(tl.where(x > least, weights, 0.0), 0)
    seen = tl.full((), 0, tl.int32)
    last = tl.full((), -1, tl.int32)
    for first in tl.range(0, vocab, BLOCK):
        is_tie = _row(logits, masks, first, vocab, MASKED, BLOCK) == least
        before = seen + tl.cumsum(is_tie.to(tl.int32), 0) - 1
        kept = is_tie & ((before == 0) | (above + before.to(tl.float64) * each < wanted))
        tokens = first + tl.arange(0, BLOCK)
        last = tl.maximum(last, tl.max(tl.where(kept, tokens, -1), 0))
        seen += tl.sum(is_tie.to(tl.int32), 0)
    return last
