"""Logit biases, tokens that are barred for a while, and penalties, applied to rows of logits.

Shapes: N rows, V vocabulary, X and Y the most ids that a row has.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ridgeline.kernels.triton.launch import next_power_of_2

IN_PROMPT = 1 << 30  # of an entry of a history
_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Repetition, frequency and presence of rows (float32 ``[N]``), and what they count.

    ``history`` int32 ``[slots, V]``: how often a token is in the output of a slot, plus `IN_PROMPT`
    if it is in its prompt. ``slots_N`` int32 is the slot of each row, −1 for one without penalties.
    """

    slots_N: torch.Tensor
    history: torch.Tensor
    repetition_N: torch.Tensor
    frequency_N: torch.Tensor
    presence_N: torch.Tensor


def adjust_logits(
    logits_NV: torch.Tensor,
    *,
    position_N: torch.Tensor,
    bias: tuple[torch.Tensor, torch.Tensor] | None = None,
    barred: tuple[torch.Tensor, torch.Tensor] | None = None,
    penalties: Penalties | None = None,
) -> None:
    """Change rows in place, in the order of `ridgeline.decoding.sampling`.

    ``bias``: ids int32 ``[N, X]`` and what is added, float32 ``[N, X]``. ``barred``: ids int32
    ``[N, Y]`` that become −inf, and until which position, int32 ``[N]``; whoever fills it sets 0
    where a mask allows nothing else. Ids are −1 where a row has no more.

    Raises:
        ValueError: logits are not float32.
    """
    if logits_NV.dtype != torch.float32:
        raise ValueError(f"logits that are adjusted are float32, not {logits_NV.dtype}")
    num_rows, vocab = logits_NV.shape
    if bias is not None or barred is not None:
        ids, values = bias or (position_N, logits_NV)
        barred_ids, until = barred or (position_N, position_N)
        _add_and_bar[(num_rows,)](
            logits_NV,
            ids,
            values,
            barred_ids,
            until,
            position_N,
            logits_NV.stride(0),
            ids.shape[1] if bias else 0,
            barred_ids.shape[1] if barred else 0,
            BLOCK_X=next_power_of_2(ids.shape[1]) if bias else 1,
            BLOCK_Y=next_power_of_2(barred_ids.shape[1]) if barred else 1,
            num_warps=4,
        )
    if penalties is not None:
        _penalise[(num_rows, -(-vocab // _BLOCK))](
            logits_NV,
            penalties.slots_N,
            penalties.history,
            penalties.repetition_N,
            penalties.frequency_N,
            penalties.presence_N,
            logits_NV.stride(0),
            penalties.history.stride(0),
            vocab,
            IN_PROMPT=IN_PROMPT,
            BLOCK=_BLOCK,
            num_warps=4,
        )


def count_tokens(history: torch.Tensor, slots_N: torch.Tensor, tokens_N: torch.Tensor) -> None:
    """Add each row's token, if it has one, to the history of its slot; −1 stands for none."""
    _count[(len(slots_N),)](history, slots_N, tokens_N, history.stride(0), num_warps=1)


@triton.jit
def _add_and_bar(
    logits,
    ids,
    values,
    barred,
    until,
    positions,
    logits_stride,
    num_ids,
    num_barred,
    BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * logits_stride
    if num_ids > 0:
        x = tl.arange(0, BLOCK_X)
        token = tl.load(ids + row * num_ids + x, mask=x < num_ids, other=-1)
        value = tl.load(values + row * num_ids + x, mask=x < num_ids, other=0.0)
        before = tl.load(logits + token, mask=token >= 0, other=0.0)
        tl.store(logits + token, before + value, mask=token >= 0)
        tl.debug_barrier()  # a token may also be barred, by another thread
    if (num_barred > 0) & (tl.load(positions + row) < tl.load(until + row)):
        y = tl.arange(0, BLOCK_Y)
        token = tl.load(barred + row * num_barred + y, mask=y < num_barred, other=-1)
        tl.store(logits + token, float("-inf"), mask=token >= 0)


@triton.jit
def _penalise(
    logits,
    slots,
    history,
    repetitions,
    frequencies,
    presences,
    logits_stride,
    history_stride,
    vocab,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < vocab
        at = logits + row.to(tl.int64) * logits_stride + tokens
        x = tl.load(at, mask=inside, other=0.0)
        seen = tl.load(history + slot * history_stride + tokens, mask=inside, other=0)
        factor = tl.load(repetitions + row)
        x = tl.where(seen > 0, tl.where(x > 0, x / factor, x * factor), x)
        count = seen % IN_PROMPT
        x -= tl.load(frequencies + row) * count.to(tl.float32)
        x -= tl.where(count > 0, tl.load(presences + row), 0.0)
        tl.store(at, x, mask=inside)


@triton.jit
def _count(history, slots, tokens, history_stride):
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(tokens + row)
    if (slot >= 0) & (token >= 0):
        tl.atomic_add(history + slot * history_stride + token, 1)
