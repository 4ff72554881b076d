"""Which tokens of a prompt stay, by the attention of its last ones (SnapKV, arXiv 2404.14469).

Shapes: W tokens that choose, P tokens of the prompt, H heads, K KV heads, d head width, G heads of
a KV head.
"""

import numpy as np
import numpy.typing as npt

from ridgeline.core.ops import Attend
from ridgeline.core.plan import Segment

POOLED = 5  # neighbours whose scores are averaged, so that what is chosen hangs together

Floats = npt.NDArray[np.floating]


def chosen_slots(
    op: Attend,
    segment: Segment,
    q_THd: Floats,
    k_PKd: Floats,
    sinks_H: Floats | None = None,
) -> npt.NDArray[np.int64]:
    """KV slots ``[K, num_chosen]`` that stay of the prompt that a segment ends, ascending.

    ``q_THd`` are the segment's queries and ``k_PKd`` the keys of all slots. A slot's score is its
    share of attention, the mean over the tokens that choose, then over neighbours, and then over
    the heads of a KV head; of equal ones the first stays.
    """
    selection = segment.selection
    assert selection is not None
    width = selection.stop - selection.start
    causal = np.tri(width, selection.stop, selection.start, dtype=bool)
    heads = op.num_heads // op.num_kv_heads
    chosen = np.empty((op.num_kv_heads, selection.num_chosen), dtype=np.int64)
    for head in range(op.num_kv_heads):
        part = slice(head * heads, (head + 1) * heads)
        q_GWd = np.ascontiguousarray(q_THd[-width:, part].swapaxes(0, 1))
        scores_GWP = op.scale * (q_GWd @ np.ascontiguousarray(k_PKd[:, head].T))
        if op.softcap is not None:
            scores_GWP = op.softcap * np.tanh(scores_GWP / op.softcap)
        sinks = None if sinks_H is None else sinks_H[part, None, None]
        shares_GWP = _softmax(np.where(causal, scores_GWP, -np.inf), sinks)
        shares_GP = shares_GWP[..., : selection.start].mean(axis=1)
        kernel = np.full(POOLED, 1 / POOLED, dtype=shares_GP.dtype)
        pooled_P = np.mean([_pooled(each, kernel) for each in shares_GP], axis=0)
        best = np.argsort(-pooled_P, kind="stable")[: selection.num_chosen]
        chosen[head] = np.sort(best)
    return chosen


def _softmax(scores: Floats, sinks: Floats | None) -> Floats:
    """Over the last axis; ``sinks`` join without a share of their own."""
    highest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        highest = np.maximum(highest, sinks)
    shares = np.exp(scores - highest)
    total = shares.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - highest)
    result: Floats = shares / total
    return result


def _pooled(scores: Floats, kernel: Floats) -> Floats:
    """Means of neighbours, zeros beyond the ends among them."""
    padded = np.pad(scores, POOLED // 2)
    result: Floats = np.convolve(padded, kernel, mode="valid")
    return result
