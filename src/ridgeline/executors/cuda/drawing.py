"""Tokens for the segments of a step whose results the host needs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ridgeline.core.plan import ModelRole
from ridgeline.decoding import ancestors, constrain
from ridgeline.executors.cuda.kernels import Kernels
from ridgeline.executors.cuda.plain import draws_plainly
from ridgeline.executors.cuda.slots import SlotTables
from ridgeline.executors.handle import Mask
from ridgeline.executors.outputs import SegmentContext, num_logit_rows, num_sampled_rows

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
    places: list[range | None] = []
    rows: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    words: list[Mask | None] = []
    adjusted: list[tuple[int, SegmentContext, int]] = []
    first = 0
    for item, mask in zip(items, masks, strict=True):
        segment = item.segment
        first += num_logit_rows(segment)
        by_rejection = item.state.verifies_by_rejection
        drafts = segment.num_drafts > 0 or role is ModelRole.DRAFT
        if not segment.outputs.sample or (drafts and by_rejection):
            places.append(None)
            continue
        count = num_sampled_rows(segment)
        places.append(range(len(rows), len(rows) + count))
        for index, depth in enumerate(_row_depths(item)):
            position = segment.stop - segment.num_drafts + depth
            if not draws_plainly(item.state, position, role):
                adjusted.append((len(rows), item, index - 1))
            rows.append(first - count + index)
            positions.append(position)
            owners.append(segment.slot)
            words.append(None if mask is None else mask[index])
    if not rows:
        return places  # type: ignore[return-value]
    sampled_NV = logits_NV.index_select(0, send(np.array(rows, dtype=np.int64)))
    for row, item, node in adjusted:
        sampled_NV[row] = _adjusted(sampled_NV[row], item, node, words[row], send)
    tokens = kernels.sample(
        sampled_NV,
        slots.settings(send(np.array(owners, dtype=np.int64))),
        send(np.array(positions, dtype=np.int64)),
        masks_NW=_masks(words, logits_NV.shape[1], send),
    ).tolist()
    return [None if place is None else [tokens[row] for row in place] for place in places]


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


def _row_depths(item: SegmentContext) -> list[int]:
    """How many drafts precede the token that each sampled row draws."""
    depths = [0]
    for parent in item.parents:
        depths.append(depths[parent + 1] + 1)
    return depths
