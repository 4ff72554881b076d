"""Drawing by the best of logits and noise, and what top-p and min-p leave of it without a search.

The best token of a set is the best of every part of the set that it is in. So the best of all (that
top-k leaves) is the token, if top-p and min-p keep it: if the tokens before it, in the order of
top-p, have less than its share of the mass. Else nothing from it on is kept, and the best of those
before it is looked at next. A draw is kept with the probability of what top-p keeps, so that one
pass to draw and one to weigh mostly suffice, and each further one is over less of the distribution.
"""

import triton
import triton.language as tl

from ridgeline.kernels.triton.top_k_kernel import BINS, DIGITS, kth_logit, limits_count

MOST_PARTS = 64
NONE = tl.constexpr(2147483647)
_DONE = tl.constexpr(-1)
_MOST = tl.constexpr(MOST_PARTS)
_LOG2E = tl.constexpr(1.4426950408889634)


# Settings are rows of tables of any width.
@triton.jit(
    do_not_specialize_on_alignment=[
        "slots", "positions", "temperatures", "seeds", "sample_indices", "top_ks", "top_ps",
        "min_ps",
    ],
)  # fmt: skip
def draw_kernel(
    logits,
    masks,
    slots,
    positions,
    temperatures,
    seeds,
    sample_indices,
    top_ks,
    top_ps,
    min_ps,
    histograms,
    limits,
    pivots,
    scores,
    found,
    tops,
    counters,
    out,
    vocab,
    logits_stride,
    mask_stride,
    part_tokens,
    MASKED: tl.constexpr,
    TRUNCATE: tl.constexpr,
    NUM_DIGITS: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of a part of a row; the program that ends last takes the best of the parts.

    With TRUNCATE it is the row's token only where nothing more is to be asked, and else its pivot.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    setting = tl.load(slots + row)
    temperature = tl.load(temperatures + setting)
    logits += row.to(tl.int64) * logits_stride
    masks += row * mask_stride
    least = tl.full((), float("-inf"), tl.float32)
    has_top_k = False
    if TRUNCATE:
        top_k = tl.load(top_ks + setting)
        has_top_k = limits_count(top_k, vocab, temperature)
        if has_top_k:
            least = kth_logit(histograms + row * DIGITS * BINS, top_k, NUM_DIGITS)
    begin = part * part_tokens
    best, token, top, is_nan, _, _ = _best_of(
        logits, masks, begin, tl.minimum(begin + part_tokens, vocab), temperature,
        tl.load(seeds + setting), tl.load(positions + row), tl.load(sample_indices + setting),
        least, 0, 0.0, 0.0, 0.0, MASKED, TRUNCATE, False, False, FILTERED, BLOCK,
    )  # fmt: skip
    # Not arithmetic on the best, which is −∞ where a part has nothing finite.
    token = tl.where(is_nan > 0, -1, token)
    best = tl.where(is_nan > 0, float("inf"), best)
    at = row * _MOST + part
    tl.store(scores + at, best)
    tl.store(found + at, token)
    tl.store(tops + at, top)
    tl.debug_barrier()  # the stores come before the count
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == num_parts - 1:
        tl.store(counters + row, 0)
        token = _best_part(scores + row * _MOST, found + row * _MOST, num_parts)
        parts = tl.arange(0, _MOST)
        top = tl.max(
            tl.load(
                tops + row * _MOST + parts,
                mask=parts < num_parts,
                other=float("-inf"),
                cache_modifier=".cg",
            ),
            0,
        )
        token = tl.where(token == NONE, -1, token)
        is_kept = True
        if TRUNCATE:
            if has_top_k:
                bins = tl.arange(0, DIGITS * BINS)
                tl.store(histograms + row * DIGITS * BINS + bins, tl.zeros_like(bins))
            x = tl.load(logits + tl.maximum(token, 0)).to(tl.float32)
            share = tl.log(tl.load(min_ps + setting))  # −∞ for none
            is_kept = tl.load(top_ps + setting) >= 1
            is_kept = is_kept & ((x.to(tl.float64) - top.to(tl.float64)) / temperature >= share)
            is_kept = is_kept | (temperature == 0) | (token < 0)
            tl.store(pivots + row, tl.where(is_kept, _DONE, token))
            tl.store(limits + 3 * row, least)
            tl.store(limits + 3 * row + 1, top)
            tl.store(limits + 3 * row + 2, x)
        if is_kept:
            tl.store(out + row, token.to(out.dtype.element_ty))


@triton.jit(
    do_not_specialize_on_alignment=[
        "slots", "positions", "temperatures", "seeds", "sample_indices", "top_ps", "min_ps",
    ],
)  # fmt: skip
def redraw_kernel(
    logits,
    masks,
    slots,
    positions,
    temperatures,
    seeds,
    sample_indices,
    top_ps,
    min_ps,
    limits,
    pivots,
    wanted,
    scores,
    found,
    befores,
    totals,
    counters,
    out,
    vocab,
    logits_stride,
    mask_stride,
    part_tokens,
    MASKED: tl.constexpr,
    FIRST: tl.constexpr,
    ALONE: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weigh what comes before the pivot of a row, in parts, and keep the pivot or take the best of
    that as the next one. FIRST: add up the whole mass. ALONE: one program for each row, which goes
    on until a token is kept."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    pivot = tl.load(pivots + row)
    if pivot >= 0:
        setting = tl.load(slots + row)
        temperature = tl.load(temperatures + setting)
        seed = tl.load(seeds + setting)
        position = tl.load(positions + row)
        sample_index = tl.load(sample_indices + setting)
        top_p = tl.load(top_ps + setting)
        share = tl.log(tl.load(min_ps + setting))  # −∞ for none
        logits += row.to(tl.int64) * logits_stride
        masks += row * mask_stride
        least = tl.load(limits + 3 * row)
        largest = tl.load(limits + 3 * row + 1)
        pivot_x = tl.load(limits + 3 * row + 2)
        if ALONE:
            share_of_mass = tl.load(wanted + row)
            while pivot >= 0:
                _, token, _, _, before, _ = _best_of(
                    logits, masks, 0, vocab, temperature, seed, position, sample_index, least,
                    pivot, pivot_x, largest, share, MASKED, True, True, False, FILTERED, BLOCK,
                )  # fmt: skip
                kept, pivot = _judged(
                    pivot, pivot_x, token, before, share_of_mass, largest, temperature, top_p, share
                )
                pivot_x = tl.load(logits + tl.maximum(pivot, 0)).to(tl.float32)
                tl.store(out + row, kept.to(out.dtype.element_ty), mask=pivot < 0)
        else:
            begin = part * part_tokens
            best, token, _, _, before, total = _best_of(
                logits, masks, begin, tl.minimum(begin + part_tokens, vocab), temperature, seed,
                position, sample_index, least, pivot, pivot_x, largest, share,
                MASKED, True, True, FIRST, FILTERED, BLOCK,
            )  # fmt: skip
            at = row * _MOST + part
            tl.store(scores + at, best)
            tl.store(found + at, token)
            tl.store(befores + at, before)
            tl.store(totals + at, total)
            tl.debug_barrier()  # the stores come before the count
            num_parts = tl.num_programs(1)
            if tl.atomic_add(counters + row, 1, sem="acq_rel") == num_parts - 1:
                tl.store(counters + row, 0)
                token = _best_part(scores + row * _MOST, found + row * _MOST, num_parts)
                inside = tl.arange(0, _MOST) < num_parts
                parts = row * _MOST + tl.arange(0, _MOST)
                before = tl.sum(
                    tl.load(befores + parts, mask=inside, other=0.0, cache_modifier=".cg"), 0
                )
                total = tl.sum(
                    tl.load(totals + parts, mask=inside, other=0.0, cache_modifier=".cg"), 0
                )
                share_of_mass = total * top_p
                if FIRST:
                    tl.store(wanted + row, share_of_mass)
                else:
                    share_of_mass = tl.load(wanted + row)
                kept, pivot = _judged(
                    pivot, pivot_x, token, before, share_of_mass, largest, temperature, top_p, share
                )
                x = tl.load(logits + tl.maximum(pivot, 0)).to(tl.float32)
                tl.store(pivots + row, pivot)
                tl.store(limits + 3 * row + 2, x)
                tl.store(out + row, kept.to(out.dtype.element_ty), mask=pivot < 0)


@triton.jit
def _judged(pivot, pivot_x, token, before, wanted, largest, temperature, top_p, share):
    """The token that is kept, and the next pivot, which is negative if one is kept.

    ``token`` is the best of those before the pivot that min-p keeps.
    """
    is_kept = (top_p >= 1) | (before < wanted)
    is_kept = is_kept & ((pivot_x.to(tl.float64) - largest.to(tl.float64)) / temperature >= share)
    kept = tl.where(is_kept, pivot, tl.where(token == NONE, -1, token))
    is_done = is_kept | (token == NONE) | (top_p >= 1)
    return kept, tl.where(is_done, _DONE, token)


@triton.jit
def _best_of(
    logits,
    masks,
    begin,
    end,
    temperature,
    seed,
    position,
    sample_index,
    least,
    pivot,
    pivot_x,
    largest,
    share,
    MASKED: tl.constexpr,
    TRUNCATE: tl.constexpr,
    WEIGH: tl.constexpr,
    TOTAL: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of tokens [begin, end) that are allowed: the best score and its token; the largest logit that
    there is, and whether one is not a number, or too large to subtract.

    WEIGH: of those before the pivot alone, whose mass comes next; with TOTAL the mass of all.
    FILTERED: blocks of which no token can be the best, by scores in float32, are passed over.
    """
    best = tl.full((), float("-inf"), tl.float64)
    best_token = tl.full((), 0, tl.int32) + NONE
    top = tl.full((), float("-inf"), tl.float32)
    is_nan = tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.float64)
    total = tl.full((), 0, tl.float64)
    for first in tl.range(begin, end, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        allowed = tokens < end
        x = tl.load(logits + tokens, mask=allowed, other=float("-inf")).to(tl.float32)
        if MASKED:
            words = tl.load(masks + tokens // 32, mask=allowed, other=0)
            allowed = allowed & (((words >> (tokens % 32)) & 1) == 1)
        if not WEIGH:
            largest_right = tl.where(temperature > 0, 3.4028234663852886e38, float("inf"))
            wrong = allowed & ((x != x) | (x > largest_right))
            is_nan = tl.maximum(is_nan, tl.max(wrong.to(tl.int32), 0))
            top = tl.maximum(top, tl.max(tl.where(allowed & (x == x), x, float("-inf")), 0))
        allowed = allowed & (x > float("-inf"))
        if TRUNCATE:
            allowed = allowed & (x >= least)
        if WEIGH:
            inverse = (1 / temperature).to(tl.float32) * _LOG2E
            weights = tl.exp2((x - largest) * inverse).to(tl.float64)
            if TOTAL:
                total += tl.sum(tl.where(allowed, weights, 0.0), 0)
            allowed = allowed & ((x > pivot_x) | ((x == pivot_x) & (tokens < pivot)))
            before += tl.sum(tl.where(allowed, weights, 0.0), 0)
            if share > float("-inf"):
                distance = (x.to(tl.float64) - largest.to(tl.float64)) / temperature
                allowed = allowed & (distance >= share)
        if tl.max(allowed.to(tl.int32), 0) > 0:
            score = x.to(tl.float64)
            # Below that, float32 may not have the inverse.
            may_win = (temperature < 1e-30) | (not FILTERED)
            if temperature > 0:
                bits = _random_bits(first, seed, position, sample_index, BLOCK)
                if FILTERED:
                    nearly = tl.where(allowed, _nearly(x, temperature, bits), float("-inf"))
                    most = _at_most(tl.max(nearly, 0))
                    may_win = may_win | (most >= best) | (most != most)
                if may_win:
                    score = score / temperature + _noise(bits)
            if may_win:
                score = tl.where(allowed, score, float("-inf"))
                block_best = tl.max(score, 0)
                token = tl.min(tl.where(allowed & (score == block_best), tokens, NONE), 0)
                better = block_best > best
                best_token = tl.where(better, token, best_token)
                best = tl.where(better, block_best, best)
    return best, best_token, top, is_nan, before, total


@triton.jit
def _best_part(scores, found, num_parts):
    """The best token of all parts of a row, the first of equals."""
    parts = tl.arange(0, _MOST)
    inside = parts < num_parts
    bests = tl.load(scores + parts, mask=inside, other=float("-inf"), cache_modifier=".cg")
    tokens = tl.load(found + parts, mask=inside, other=NONE, cache_modifier=".cg")
    return tl.min(tl.where(bests == tl.max(bests, 0), tokens, NONE), 0)


@triton.jit
def _random_bits(first, seed, position, sample_index, BLOCK: tl.constexpr):
    """Random bits of tokens first to first + BLOCK, 23 each."""
    counter = first // 4 + tl.arange(0, BLOCK // 4)
    same = counter * 0
    w0, w1, w2, w3 = tl.philox(seed, counter, same + position, same + sample_index, same)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)) >> 9


@triton.jit
def _noise(bits):
    """Gumbel noise of random bits, as `ridgeline.decoding.noise` has it."""
    uniform = (bits.to(tl.float64) + 0.5) * 1.1920928955078125e-07  # 2⁻²³
    return -tl.log(-tl.log(uniform))


@triton.jit
def _nearly(x, temperature, bits):
    """Scores in float32, at a fraction of the time: those of logits and noise within 1e-4 and a
    millionth of their size.

    The logarithm of the hardware is wrong by 2⁻²² at most, or by that part of it. That is too much
    near 1, where the first terms of its series are exact enough.
    """
    rest = (8388607.5 - bits.to(tl.float32)) * 1.1920928955078125e-07  # from 1, and exact
    series = rest * (1 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))
    exponential = tl.where(rest < 0.03125, series, -tl.log(1 - rest))
    return x * (1 / temperature).to(tl.float32) - tl.log(exponential)


@triton.jit
def _at_most(score):
    """What a score is below, of which `_nearly` is known."""
    return score + 1e-3 + 1e-5 * tl.abs(score)
