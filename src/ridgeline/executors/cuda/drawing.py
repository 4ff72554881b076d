"""Tokens for the segments of a step whose results the host needs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ridgeline.core.plan import ModelRole
from ridgeline.decoding import ancestors, constrain
from ridgeline.executors.cuda.kernels import Kernels
from ridgeline.executors.cuda.plain import by_rejection, is_adjusted
from ridgeline.executors.cuda.slots import SlotTables
from ridgeline.executors.handle import Mask
from ridgeline.executors.outputs import SegmentContext, num_logit_rows, rows_to_draw

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
    """For each segment the tokens of its sampled rows, −1 where none is possible.

    ``None`` if none is wanted, or where drafts are drawn or verified by rejection.
    """
    rows, spans = rows_to_draw(items, role, num_logit_rows)
    if not rows:
        return [None] * len(spans)
    words = [None if (mask := masks[row.number]) is None else mask[row.node + 1] for row in rows]
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
    ).tolist()
    return [None if span is None else tokens[span.start : span.stop] for span in spans]


def _adjusted(
    logits_V: torch.Tensor, item: SegmentContext, node: int, words: Mask | None, send: Send
) -> torch.Tensor:
    """The row after draft ``node`` (−1: the last known token), as it is drawn from."""
    known = item.known[: item.segment.stop - item.segment.num_drafts]
    path = [item.drafts[each] for each in ancestors(item.parents, node)]
    mask_V = None
    if words is not None:
        bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
        mask_V = send(bits[: len(logits_V)].astype(bool))
    history = item.state.history([*known, *path])
    params = item.state.admission.params
    return constrain(logits_V, params, history, mask_V=mask_V).to(logits_V.dtype)


def _masks(words: Sequence[Mask | None], vocab: int, send: Send) -> torch.Tensor | None:
    """int32 words of allowed tokens, all of them where there is no mask."""
    if all(mask is None for mask in words):
        return None
    every = np.full((vocab + 31) // 32, 0xFFFFFFFF, dtype=np.uint32)
    table = np.stack([every if mask is None else mask for mask in words])
    return send(table.view(np.int32))
