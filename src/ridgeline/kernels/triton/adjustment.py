"""Logit biases, tokens that are barred for a while, and penalties, applied to rows of logits.

Shapes: N rows, R slots, V vocabulary, X the most tokens that a slot edits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ridgeline.core.rounding import ceil_div
from ridgeline.kernels.triton.launch import next_power_of_2

IN_PROMPT = 1 << 30  # of an entry of a history
_IN_PROMPT = tl.constexpr(IN_PROMPT)
_BLOCK = 1024
_EDITS = 256  # at once


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjustmentTables:
    """What changes the logits of sequences, by slot.

    Attributes:
        penalties: float64 ``[3, R]``: repetition, frequency and presence; 1, 0, 0 for none.
        history: int32 ``[R, V]``: how often a token is in the output, plus `IN_PROMPT` if it is in
            the prompt.
        counted: int32 ``[R]``, how many tokens of the sequence the history has; −1 for sequences
            without penalties, which have none.
        edit_ids, edit_values, edit_until: int32, float64 and int32 ``[R, X]``: a token, each once,
            what is added to its logit, and the position before which it cannot be drawn.
        num_edits: int32 ``[R]``.
    """

    penalties: torch.Tensor
    history: torch.Tensor
    counted: torch.Tensor
    edit_ids: torch.Tensor
    edit_values: torch.Tensor
    edit_until: torch.Tensor
    num_edits: torch.Tensor

    @classmethod
    def empty(
        cls, num_slots: int, vocab: int, most_edits: int, device: torch.device | str
    ) -> "AdjustmentTables":
        """Tables of ``num_slots`` slots that change nothing."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        penalties = zeros(3, num_slots, dtype=torch.float64)
        penalties[0].fill_(1.0)
        return cls(
            penalties=penalties,
            history=zeros(num_slots, vocab),
            counted=zeros(num_slots) - 1,
            edit_ids=zeros(num_slots, most_edits),
            edit_values=zeros(num_slots, most_edits, dtype=torch.float64),
            edit_until=zeros(num_slots, most_edits),
            num_edits=zeros(num_slots),
        )


def count_tokens(
    tables: AdjustmentTables,
    slots_N: torch.Tensor,
    tokens_N: torch.Tensor,
    stops_N: torch.Tensor,
) -> None:
    """Add each row's token, which is at position ``stops_N`` − 1, to the history of its slot, if it
    is the next that the history lacks. Slots and tokens are int64, stops int32; no two rows have
    the same slot, but for slots without penalties.
    """
    num_rows = len(slots_N)
    block = min(_BLOCK, next_power_of_2(num_rows))
    _count[(ceil_div(num_rows, block),)](
        tables.history,
        tables.counted,
        slots_N,
        tokens_N,
        stops_N,
        num_rows,
        tables.history.stride(0),
        BLOCK=block,
        num_warps=4,
    )


def adjust_logits(
    logits_NV: torch.Tensor,
    out_NV: torch.Tensor,
    tables: AdjustmentTables,
    slots_N: torch.Tensor,
    positions_N: torch.Tensor,
) -> None:
    """out = logits as `ridgeline.decoding.sampling.constrain` changes them for tokens that are
    drawn at ``positions_N`` (int32), in float64 (frequency · count in float32, as there) and
    rounded to float32. Slots are int64.

    Where all that is not barred is −∞, nothing is left: whoever fills the tables sees to it.

    Raises:
        ValueError: ``out`` is not float32.
    """
    if out_NV.dtype != torch.float32:
        raise ValueError(f"logits that are adjusted are float32, not {out_NV.dtype}")
    num_rows, vocab = logits_NV.shape
    _adjust[(num_rows, ceil_div(vocab, _BLOCK))](
        logits_NV,
        out_NV,
        slots_N,
        positions_N,
        *tables.penalties,
        tables.history,
        tables.counted,
        tables.edit_ids,
        tables.edit_values,
        tables.edit_until,
        tables.num_edits,
        vocab,
        logits_NV.stride(0),
        out_NV.stride(0),
        tables.history.stride(0),
        tables.edit_ids.stride(0),
        BLOCK=_BLOCK,
        EDITS=min(_EDITS, next_power_of_2(tables.edit_ids.shape[1])),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "tokens"])
def _count(
    history,
    counted,
    slots,
    tokens,
    stops,
    num_rows,
    history_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots + row, mask=inside, other=0)
    stop = tl.load(stops + row, mask=inside, other=0)
    is_next = inside & (tl.load(counted + slot, mask=inside, other=-1) == stop - 1)
    entry = history + slot * history_stride + tl.load(tokens + row, mask=inside, other=0)
    tl.store(entry, tl.load(entry, mask=is_next, other=0) + 1, mask=is_next)
    tl.store(counted + slot, stop, mask=is_next)


@triton.jit(
    do_not_specialize_on_alignment=["slots", "positions", "repetitions", "frequencies", "presences"]
)
def _adjust(
    logits,
    out,
    slots,
    positions,
    repetitions,
    frequencies,
    presences,
    history,
    counted,
    edit_ids,
    edit_values,
    edit_until,
    num_edits,
    vocab,
    logits_stride,
    out_stride,
    history_stride,
    edit_stride,
    BLOCK: tl.constexpr,
    EDITS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    repetition = tl.load(repetitions + slot)
    frequency = tl.load(frequencies + slot)
    presence = tl.load(presences + slot)
    position = tl.load(positions + row)
    edits = tl.load(num_edits + slot)
    is_penalised = tl.load(counted + slot) >= 0
    logits += row.to(tl.int64) * logits_stride
    out += row.to(tl.int64) * out_stride
    history += slot * history_stride
    begin = tl.program_id(1) * BLOCK
    tokens = begin + tl.arange(0, BLOCK)
    inside = tokens < vocab
    x = tl.load(logits + tokens, mask=inside, other=0.0).to(tl.float64)
    if is_penalised:
        seen = tl.load(history + tokens, mask=inside, other=0)
        x = _penalised(x, seen, repetition, frequency, presence)
    tl.store(out + tokens, x.to(tl.float32), mask=inside)
    if edits > 0:
        tl.debug_barrier()  # what is edited has been stored by another thread
        for first in tl.range(0, edits, EDITS):
            edit = slot * edit_stride + first + tl.arange(0, EDITS)
            own = first + tl.arange(0, EDITS) < edits
            token = tl.load(edit_ids + edit, mask=own, other=-1)
            own = own & (token >= begin) & (token < begin + BLOCK)
            edited = tl.load(logits + token, mask=own, other=0.0).to(tl.float64)
            edited += tl.load(edit_values + edit, mask=own, other=0.0)
            barred = position < tl.load(edit_until + edit, mask=own, other=0)
            edited = tl.where(barred, float("-inf"), edited)
            if is_penalised:
                count = tl.load(history + token, mask=own, other=0)
                edited = _penalised(edited, count, repetition, frequency, presence)
            tl.store(out + token, edited.to(tl.float32), mask=own)


@triton.jit
def _penalised(x, seen, repetition, frequency, presence):
    x = tl.where(seen > 0, tl.where(x > 0, x / repetition, x * repetition), x)
    count = seen % _IN_PROMPT
    x -= (frequency.to(tl.float32) * count.to(tl.float32)).to(tl.float64)
    return x - tl.where(count > 0, presence.to(tl.float32), 0.0).to(tl.float64)
