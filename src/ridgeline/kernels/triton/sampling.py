"""From rows of logits to tokens: the draws of `ridgeline.decoding.sampling`, on the device.

The noise is the same bits (Philox4x32-10, `ridgeline.core.philox`) and scores are float64. Nothing
is sorted: the k-th largest logit is found by radix, and whether top-p and min-p keep a token is
asked of the one that is drawn.

Shapes: N rows, R slots, V vocabulary, W words of a mask.
"""

from dataclasses import dataclass

import torch

from ridgeline.core.rounding import ceil_div
from ridgeline.kernels.triton.draw_kernels import MOST_PARTS, draw_kernel, redraw_kernel
from ridgeline.kernels.triton.launch import next_power_of_2, num_multiprocessors
from ridgeline.kernels.triton.top_k_kernel import BINS, DIGITS, count_digits_kernel

_BLOCK = 1024
_PROGRAMS_EACH = 8
_FILTERED_BLOCKS = 8  # of a part, from which on it pays to score them roughly first
_NUM_DIGITS = {torch.bfloat16: 2, torch.float16: 3, torch.float32: 4}  # in which logits differ
_REDRAWS = 3  # of the whole device, before each row goes on by itself


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

        parts = (max_rows, MOST_PARTS)
        self.scores = empty(*parts, dtype=torch.float64)
        self.tokens = empty(*parts, dtype=torch.int32)
        self.tops = empty(*parts, dtype=torch.float32)
        self.masses = empty(2, *parts, dtype=torch.float64)  # before the pivot, and of all
        self.wanted = empty(max_rows, dtype=torch.float64)  # mass, by top-p
        self.limits = empty(max_rows, 3, dtype=torch.float32)  # logits: least, largest, pivot's
        self.pivots = empty(max_rows, dtype=torch.int32)
        # Zero between calls.
        shape = (max_rows, DIGITS.value, BINS.value)
        self.histograms = torch.zeros(shape, dtype=torch.int32, device=device)
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
    """Draw a token for each row; −1 where none is possible (NaN, nothing allowed, or +∞ of which
    no other logit can be subtracted; greedy rows take it).

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
    is_masked = masks_NW is not None
    wanted = num_multiprocessors(logits_NV.device) * _PROGRAMS_EACH // num_rows
    blocks = ceil_div(vocab, _BLOCK)
    parts = min(MOST_PARTS, next_power_of_2(max(1, min(wanted, blocks))))
    part_tokens = ceil_div(blocks, parts) * _BLOCK
    sizes = (vocab, logits_NV.stride(0), mask_stride, part_tokens)
    filtered = part_tokens >= _FILTERED_BLOCKS * _BLOCK
    num_digits = _NUM_DIGITS[logits_NV.dtype]
    for digit in range(num_digits if truncate else 0):
        count_digits_kernel[(num_rows, parts)](
            logits_NV,
            masks,
            rows.slots_N,
            rows.temperature_R,
            rows.top_k_R,
            workspace.histograms,
            *sizes,
            DIGIT=digit,
            MASKED=is_masked,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    draws = (
        logits_NV,
        masks,
        rows.slots_N,
        rows.position_N,
        rows.temperature_R,
        rows.seed_R,
        rows.sample_index_R,
    )
    draw_kernel[(num_rows, parts)](
        *draws,
        rows.top_k_R,
        rows.top_p_R,
        rows.min_p_R,
        workspace.histograms,
        workspace.limits,
        workspace.pivots,
        workspace.scores,
        workspace.tokens,
        workspace.tops,
        workspace.counters,
        tokens_N,
        *sizes,
        MASKED=is_masked,
        TRUNCATE=truncate,
        NUM_DIGITS=num_digits,
        FILTERED=filtered,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    for redraw in range(_REDRAWS + 1 if truncate else 0):
        alone = redraw == _REDRAWS
        redraw_kernel[(num_rows, 1 if alone else parts)](
            *draws,
            rows.top_p_R,
            rows.min_p_R,
            workspace.limits,
            workspace.pivots,
            workspace.wanted,
            workspace.scores,
            workspace.tokens,
            *workspace.masses,
            workspace.counters,
            tokens_N,
            *sizes,
            MASKED=is_masked,
            FIRST=redraw == 0,
            ALONE=alone,
            FILTERED=alone or filtered,
            BLOCK=_BLOCK * (4 if alone else 1),
            num_warps=16 if alone else 4,
        )
