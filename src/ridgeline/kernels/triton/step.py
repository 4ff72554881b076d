"""What surrounds the layers of a decode step: its inputs made of references, and the next step's.

Shapes: T tokens, B rows of a decode step, G KV groups, R slots and one for padding, M entries of a
block table, L tokens of the log.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ridgeline.core.rounding import ceil_div
from ridgeline.kernels.triton.launch import next_power_of_2

_BLOCK = 128
_END_BLOCK = 1024


class StepRows(NamedTuple):
    """Each token of a step and where its K and V go.

    ``token_ids_T``, ``positions_T`` and ``slots_T`` are int64, ``stops_T`` int32 (positions plus
    one), ``kv_slots_GT`` int64 ``block · B + offset``. A void token is token 0 at position 0 of the
    slot of padding.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    stops_T: torch.Tensor
    kv_slots_GT: torch.Tensor

    @classmethod
    def empty(cls, num_tokens: int, num_groups: int, device: torch.device) -> "StepRows":
        """Outputs for `begin_step`."""

        def longs(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int64, device=device)

        return cls(
            token_ids_T=longs(num_tokens),
            positions_T=longs(num_tokens),
            slots_T=longs(num_tokens),
            stops_T=torch.empty(num_tokens, dtype=torch.int32, device=device),
            kv_slots_GT=longs(num_groups, num_tokens),
        )

    def picked(self, at_N: torch.Tensor) -> "StepRows":
        """Some of the tokens; ``at_N`` is int64."""
        return StepRows(
            token_ids_T=self.token_ids_T.index_select(0, at_N),
            positions_T=self.positions_T.index_select(0, at_N),
            slots_T=self.slots_T.index_select(0, at_N),
            stops_T=self.stops_T.index_select(0, at_N),
            kv_slots_GT=self.kv_slots_GT.index_select(1, at_N),
        )


def begin_step(
    sources_T: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    log_L: torch.Tensor,
    tables_GRM: torch.Tensor,
    rows: StepRows,
    *,
    block_tokens: int,
) -> None:
    """Fill ``rows``. All inputs are int64 but the block tables, which are int32.

    A source s ≥ 0 is a token, s < 0 stands for element −1 − s of the log; where that is negative,
    or not drawn, the token is void. The last of the R slots is that of padding.
    """
    num_tokens = len(sources_T)
    num_groups, num_slots, _ = tables_GRM.shape
    _begin[(ceil_div(num_tokens, _BLOCK),)](
        sources_T,
        positions_T,
        slots_T,
        log_L,
        tables_GRM,
        *rows,
        num_tokens,
        num_slots - 1,
        *tables_GRM.stride()[:2],
        GROUPS=num_groups,
        PAGE=block_tokens,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def end_step(
    sources_B: torch.Tensor,
    positions_B: torch.Tensor,
    number: torch.Tensor,
    slots_B: torch.Tensor,
    drawn_B: torch.Tensor,
    log_L: torch.Tensor,
    *,
    padding: int,
) -> None:
    """Log the tokens of step ``number`` (int64 ``[1]``) from element number · B on, −1 for rows in
    the slot of padding; then let sources refer to them, and positions and the number be the next
    step's.
    """
    num_rows = len(sources_B)
    _end[(1,)](
        sources_B,
        positions_B,
        number,
        slots_B,
        drawn_B,
        log_L,
        num_rows,
        padding,
        BLOCK=min(_END_BLOCK, next_power_of_2(num_rows)),
        num_warps=4,
    )


# Inputs of a step lie behind each other in one tensor, and so anywhere.
@triton.jit(
    do_not_specialize=["num_tokens", "padding"],
    do_not_specialize_on_alignment=["sources", "positions", "slots"],
)
def _begin(
    sources,
    positions,
    slots,
    log,
    tables,
    token_ids,
    kept_positions,
    kept_slots,
    stops,
    kv_slots,
    num_tokens,
    padding,
    group_stride,
    slot_stride,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    source = tl.load(sources + at, mask=inside, other=0)
    logged = tl.load(log - 1 - source, mask=inside & (source < 0), other=0)
    token = tl.where(source >= 0, source, logged)
    void = token < 0
    position = tl.where(void, 0, tl.load(positions + at, mask=inside, other=0))
    slot = tl.where(void, padding, tl.load(slots + at, mask=inside, other=0))
    tl.store(token_ids + at, tl.where(void, 0, token), mask=inside)
    tl.store(kept_positions + at, position, mask=inside)
    tl.store(kept_slots + at, slot, mask=inside)
    tl.store(stops + at, (position + 1).to(tl.int32), mask=inside)
    for group in tl.static_range(GROUPS):
        entries = tables + group * group_stride + slot * slot_stride + position // PAGE
        block = tl.load(entries, mask=inside, other=0).to(tl.int64)
        tl.store(kv_slots + group * num_tokens + at, block * PAGE + position % PAGE, mask=inside)


@triton.jit(
    do_not_specialize=["num_rows", "padding"],
    do_not_specialize_on_alignment=["sources", "positions", "number"],
)
def _end(
    sources,
    positions,
    number,
    slots,
    drawn,
    log,
    num_rows,
    padding,
    BLOCK: tl.constexpr,
):
    step = tl.load(number)
    tl.debug_barrier()  # all threads have read the number before one changes it
    for first in tl.range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < num_rows
        place = step * num_rows + row
        void = tl.load(slots + row, mask=inside, other=0) == padding
        token = tl.load(drawn + row, mask=inside, other=0)
        tl.store(log + place, tl.where(void, -1, token), mask=inside)
        tl.store(sources + row, -1 - place, mask=inside)
        position = tl.load(positions + row, mask=inside, other=0)
        tl.store(positions + row, position + 1, mask=inside)
    tl.store(number, step + 1)
