"""Tokens for the segments of a step whose results the host needs."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from ridgeline.core.plan import ModelRole
from ridgeline.decoding import constrain
from ridgeline.executors import outputs
from ridgeline.executors.cuda.deferrable import by_rejection, is_adjusted
from ridgeline.executors.cuda.kernels import Kernels
from ridgeline.executors.cuda.slots import SlotTables
from ridgeline.executors.handle import Mask
from ridgeline.executors.outputs import DrawnRow, SegmentContext, num_logit_rows
from ridgeline.kernels.tensors import as_array

Send = Callable[[Any], torch.Tensor]


def draw_tokens(
    kernels: Kernels,
    slots: SlotTables,
    items: Sequence[SegmentContext],
    logits_NV: torch.Tensor,
    masks: Sequence[Mask | None],
    role: ModelRole,
    send: Send,
) -> list[list[int] | None]:
    """For each segment the tokens of its sampled rows; see `outputs.draw_tokens`."""

    def draw(rows: Sequence[DrawnRow], words: Sequence[Mask | None]) -> list[int]:
        logit_rows = np.array([row.logit_row for row in rows], dtype=np.int64)
        sampled_NV = logits_NV.index_select(0, send(logit_rows))
        for place, row in enumerate(rows):
            item = items[row.number]
            if is_adjusted(item.state, row.position) or by_rejection(item.state, role):
                adjusted_V = _adjusted(sampled_NV[place], item, row.node, words[place], send)
                sampled_NV[place] = adjusted_V
        slot_of_row = np.array([items[row.number].segment.slot for row in rows], dtype=np.int64)
        tokens = kernels.sample(
            sampled_NV,
            slots.settings,
            send(slot_of_row),
            send(np.array([row.position for row in rows], dtype=np.int64)),
            masks_NW=_masks(words, logits_NV.shape[1], send),
        )
        return cast(list[int], tokens.tolist())

    return outputs.draw_tokens(items, role, masks, num_logit_rows, draw)


def _adjusted(
    logits_V: torch.Tensor, item: SegmentContext, node: int, words: Mask | None, send: Send
) -> torch.Tensor:
    """The row after draft ``node`` (−1: the last known token), as it is drawn from."""
    mask_V = None
    if words is not None:
        bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
        mask_V = bits[: len(logits_V)].astype(bool)
    history = item.state.history(item.tokens_before(node))
    params = item.state.admission.params
    return send(constrain(as_array(logits_V), params, history, mask_V=mask_V)).to(logits_V.dtype)


def _masks(words: Sequence[Mask | None], vocab: int, send: Send) -> torch.Tensor | None:
    """int32 words of allowed tokens, all of them where there is no mask."""
    if all(mask is None for mask in words):
        return None
    every = np.full((vocab + 31) // 32, 0xFFFFFFFF, dtype=np.uint32)
    table = np.stack([every if mask is None else mask for mask in words])
    return send(table.view(np.int32))
