"""The least logit that top-k keeps, by radix: digit after digit of it, from counts of all logits.

The bits of a float32, turned so that they are ordered as integers, are four digits of eight bits;
numbers that were bfloat16 differ in the first two of them, float16 in three. For each digit there
is one kernel, whose programs add up how often the digit has each value among those logits of their
row that begin as the k-th does.
"""

import triton
import triton.language as tl

DIGITS = tl.constexpr(4)
BINS = tl.constexpr(256)
_SIGN = tl.constexpr(0x80000000)
_ALL = tl.constexpr(0xFFFFFFFF)


@triton.jit(do_not_specialize_on_alignment=["slots", "temperatures", "top_ks"])
def count_digits_kernel(
    logits,
    masks,
    slots,
    temperatures,
    top_ks,
    histograms,
    vocab,
    logits_stride,
    mask_stride,
    part_tokens,
    DIGIT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a part's counts of digit number DIGIT to its row's, where the row has a top-k."""
    row = tl.program_id(0)
    setting = tl.load(slots + row)
    top_k = tl.load(top_ks + setting)
    if limits_count(top_k, vocab, tl.load(temperatures + setting)):
        histograms += row * DIGITS * BINS
        logits += row.to(tl.int64) * logits_stride
        prefix = _prefix(histograms, top_k, DIGIT)
        begin = tl.program_id(1) * part_tokens
        end = tl.minimum(begin + part_tokens, vocab)
        counts = tl.zeros((BINS,), tl.int32)
        for first in tl.range(begin, end, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            inside = tokens < end
            x = tl.load(logits + tokens, mask=inside, other=0.0).to(tl.float32)
            allowed = x == x
            if MASKED:
                words = tl.load(masks + row * mask_stride + tokens // 32, mask=inside, other=0)
                allowed = allowed & (((words >> (tokens % 32)) & 1) == 1)
            bits = tl.where(allowed, x, float("-inf")).to(tl.uint32, bitcast=True)
            keys = tl.where(bits >= _SIGN, bits ^ _ALL, bits | _SIGN)
            if DIGIT > 0:
                inside = inside & (keys >> (32 - 8 * DIGIT) == prefix)
            digits = ((keys >> (24 - 8 * DIGIT)) & 255).to(tl.int32)
            if tl.max(inside.to(tl.int32), 0) > 0:
                counts += tl.histogram(digits, BINS, mask=inside)
        bins = histograms + DIGIT * BINS + tl.arange(0, BINS)
        tl.atomic_add(bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def limits_count(top_k, vocab, temperature):
    """Whether a row has a top-k that leaves anything out."""
    return (top_k > 0) & (top_k < vocab) & (temperature > 0)


@triton.jit
def kth_logit(histograms, top_k, NUM_DIGITS: tl.constexpr):
    """The k-th largest logit of a row whose digits have been counted."""
    prefix = _prefix(histograms, top_k, NUM_DIGITS)
    SHIFT: tl.constexpr = 32 - 8 * NUM_DIGITS
    key = prefix
    if SHIFT > 0:
        rest: tl.constexpr = (1 << SHIFT) - 1
        key = prefix << SHIFT
        key = tl.where(key >= _SIGN, key, key | rest)  # a negative's last bits are turned zeros
    bits = tl.where(key >= _SIGN, key ^ _SIGN, key ^ _ALL)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _prefix(histograms, wanted, NUM_DIGITS: tl.constexpr):
    """The first digits of the key that is number ``wanted`` from the largest on."""
    prefix = tl.full((), 0, tl.uint32)
    digits = tl.arange(0, BINS)
    for digit in tl.static_range(NUM_DIGITS):
        counts = tl.load(histograms + digit * BINS + digits)
        from_here = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        found = tl.max(tl.where(from_here >= wanted, digits, 0), 0)
        wanted -= tl.sum(tl.where(digits > found, counts, 0), 0)
        prefix = prefix * 256 + found.to(tl.uint32)
    return prefix
