"""From rows of logits to tokens: the draws of `ridgeline.decoding.sampling`, on the device.

The noise is the same bits (Philox4x32-10, `ridgeline.core.philox`), scores are float64, and what
top-k, top-p and min-p leave is found by bisection instead of a sort.

Shapes: N rows, R slots, V vocabulary, W words of a mask.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ridgeline.kernels.triton.launch import next_power_of_2, num_multiprocessors
from ridgeline.kernels.triton.truncation import NO_TIE, truncation_kernel

_BLOCK = 1024
_MOST_PARTS = 64
_PROGRAMS_EACH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Settings by slot, and the slot and position of each row, on the device.

    ``slots_N`` int64; ``position_N`` int32, the number of tokens before the one that is drawn;
    ``temperature_R`` float64, 0 for greedy; ``seed_R`` int64, the bits of the unsigned seed;
    ``sample_index_R`` int32; ``top_k_R`` int32, 0 or less for all; ``top_p_R`` and ``min_p_R``
    float64.
    """

    slots_N: torch.Tensor
    position_N: torch.Tensor
    temperature_R: torch.Tensor
    seed_R: torch.Tensor
    sample_index_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor


class SampleWorkspace:
    """Scratch memory of `sample` for up to ``max_rows`` rows; one for each stream."""

    def __init__(self, max_rows: int, device: torch.device | str) -> None:
        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.scores = empty(max_rows, _MOST_PARTS, dtype=torch.float64)
        self.tokens = empty(max_rows, _MOST_PARTS, dtype=torch.int32)
        self.limits = empty(max_rows, 2, dtype=torch.float32)  # the least logit kept, the largest
        self.ties = empty(max_rows, dtype=torch.int32)
        self.counters = torch.zeros(max_rows, dtype=torch.int32, device=device)


def sample(
    logits_NV: torch.Tensor,
    rows: SamplingRows,
    tokens_N: torch.Tensor,
    *,
    workspace: SampleWorkspace,
    truncate: bool,
    masks_NW: torch.Tensor | None = None,
) -> None:
    """Draw a token for each row; −1 where none is possible (NaN, or nothing allowed).

    ``masks_NW`` int32 words of allowed tokens, bit i of word w for token 32 · w + i. Without
    ``truncate`` top-k, top-p and min-p are not looked at, for batches in which no row has any.

    Raises:
        ValueError: there are more rows than the workspace is for.
    """
    num_rows, vocab = logits_NV.shape
    if num_rows > len(workspace.counters):
        raise ValueError(f"{num_rows} rows in a workspace of {len(workspace.counters)}")
    masks = logits_NV if masks_NW is None else masks_NW
    mask_stride = 0 if masks_NW is None else masks_NW.stride(0)
    if truncate:
        truncation_kernel[(num_rows,)](
            logits_NV,
            masks,
            rows.slots_N,
            rows.temperature_R,
            rows.top_k_R,
            rows.top_p_R,
            workspace.limits,
            workspace.ties,
            vocab,
            logits_NV.stride(0),
            mask_stride,
            MASKED=masks_NW is not None,
            BLOCK=min(8192, next_power_of_2(vocab)),
            num_warps=32,
        )
    wanted = num_multiprocessors(logits_NV.device) * _PROGRAMS_EACH // num_rows
    blocks = -(-vocab // _BLOCK)
    parts = min(_MOST_PARTS, next_power_of_2(max(1, min(wanted, blocks))))
    part_tokens = -(-blocks // parts) * _BLOCK
    _draw[(num_rows, parts)](
        logits_NV,
        masks,
        rows.slots_N,
        rows.position_N,
        rows.temperature_R,
        rows.seed_R,
        rows.sample_index_R,
        rows.min_p_R,
        workspace.limits,
        workspace.ties,
        workspace.scores,
        workspace.tokens,
        workspace.counters,
        tokens_N,
        vocab,
        logits_NV.stride(0),
        mask_stride,
        part_tokens,
        PARTS=parts,
        MOST_PARTS=_MOST_PARTS,
        MASKED=masks_NW is not None,
        TRUNCATE=truncate,
        BLOCK=_BLOCK,
        num_warps=4,
    )


# Settings are rows of tables of any width.
@triton.jit(
    do_not_specialize_on_alignment=[
        "slots", "positions", "temperatures", "seeds", "sample_indices", "min_ps",
    ],
)  # fmt: skip
def _draw(
    logits,
    masks,
    slots,
    positions,
    temperatures,
    seeds,
    sample_indices,
    min_ps,
    limits,
    ties,
    scores,
    found,
    counters,
    out,
    vocab,
    logits_stride,
    mask_stride,
    part_tokens,
    PARTS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    MASKED: tl.constexpr,
    TRUNCATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of a part of a row; the program that ends last takes the best of the parts."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    setting = tl.load(slots + row)
    position = tl.load(positions + row)
    temperature = tl.load(temperatures + setting)
    seed = tl.load(seeds + setting)
    sample_index = tl.load(sample_indices + setting)
    begin = part * part_tokens
    end = tl.minimum(begin + part_tokens, vocab)
    best = tl.full((), float("-inf"), tl.float64)
    best_token = tl.full((), NO_TIE, tl.int32)
    is_nan = tl.full((), 0, tl.int32)
    for first in tl.range(begin, end, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        allowed = tokens < end
        x = tl.load(
            logits + row.to(tl.int64) * logits_stride + tokens, mask=allowed, other=float("-inf")
        ).to(tl.float32)
        if MASKED:
            words = tl.load(masks + row * mask_stride + tokens // 32, mask=allowed, other=0)
            allowed = allowed & (((words >> (tokens % 32)) & 1) == 1)
        wrong = allowed & (x != x)
        is_nan = tl.maximum(is_nan, tl.max(wrong.to(tl.int32), 0))
        allowed = allowed & (x > float("-inf"))
        score = x.to(tl.float64)
        if temperature > 0:
            if TRUNCATE:
                least = tl.load(limits + 2 * row)
                largest = tl.load(limits + 2 * row + 1).to(tl.float64)
                last_tie = tl.load(ties + row)
                allowed = allowed & ((x > least) | ((x == least) & (tokens <= last_tie)))
                share = tl.log(tl.load(min_ps + setting))  # −∞ for none
                allowed = allowed & ((score - largest) / temperature >= share)
            score = score / temperature + _noise(first, seed, position, sample_index, BLOCK)
        score = tl.where(allowed, score, float("-inf"))
        top = tl.max(score, 0)
        token = tl.min(tl.where(allowed & (score == top), tokens, NO_TIE), 0)
        better = top > best
        best_token = tl.where(better, token, best_token)
        best = tl.where(better, top, best)
    # Not arithmetic on the best, which is −∞ where a part has nothing finite.
    best_token = tl.where(is_nan > 0, -1, best_token)
    best = tl.where(is_nan > 0, float("inf"), best)
    slot = row * MOST_PARTS + part
    if PARTS > 1:
        tl.store(scores + slot, best)
        tl.store(found + slot, best_token)
        tl.debug_barrier()  # the stores come before the count
        arrived = tl.atomic_add(counters + row, 1, sem="acq_rel")
        if arrived == PARTS - 1:
            tl.store(counters + row, 0)
            parts = row * MOST_PARTS + tl.arange(0, PARTS)
            bests = tl.load(scores + parts, cache_modifier=".cg")
            tokens_found = tl.load(found + parts, cache_modifier=".cg")
            equal = bests == tl.max(bests, 0)
            _store_token(out + row, tl.min(tl.where(equal, tokens_found, NO_TIE), 0))
    else:
        _store_token(out + row, best_token)


@triton.jit
def _store_token(target, token):
    tl.store(target, tl.where(token == NO_TIE, -1, token).to(target.dtype.element_ty))


@triton.jit
def _noise(first, seed, position, sample_index, BLOCK: tl.constexpr):
    """Gumbel noise of tokens first to first + BLOCK, as `ridgeline.decoding.noise` has it."""
    counter = first // 4 + tl.arange(0, BLOCK // 4)
    same = counter * 0
    w0, w1, w2, w3 = tl.philox(seed, counter, same + position, same + sample_index, same)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    uniform = ((words >> 9).to(tl.float64) + 0.5) * 1.1920928955078125e-07  # 2⁻²³
    return -tl.log(-tl.log(uniform))
