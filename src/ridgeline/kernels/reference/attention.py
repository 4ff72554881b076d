"""Softmax attention of one segment over its context."""

import torch

from ridgeline.kernels.reference.elementwise import softcap, wide


def attend(
    q_SHd: torch.Tensor,
    k_CKd: torch.Tensor,
    v_CKd: torch.Tensor,
    visible_SC: torch.Tensor,
    *,
    scale: float,
    cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output ``[S, H, v]``; each KV head serves H / K consecutive query heads.

    V's width v may differ from d. ``visible_SC`` says which keys a query may see; every query must
    see at least one. ``sinks_H`` are scores that join each head's softmax without a value.
    """
    num_tokens, num_heads, head_dim = q_SHd.shape
    num_kv_heads = k_CKd.shape[1]
    q = wide(q_SHd).view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = softcap(torch.einsum("skgd,ckd->kgsc", q, wide(k_CKd)) * scale, cap)
    scores = scores.masked_fill(~visible_SC, float("-inf"))
    if sinks_H is not None:
        sinks = wide(sinks_H).view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_tokens, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : len(k_CKd)]
    out = torch.einsum("kgsc,ckd->skgd", weights, wide(v_CKd))
    return out.reshape(num_tokens, num_heads, -1).to(q_SHd.dtype)


def visible(
    *,
    query_positions_S: torch.Tensor,
    key_positions_C: torch.Tensor,
    drafted_SD: torch.Tensor | None,
    window: int | None,
    chunked: bool = False,
) -> torch.Tensor:
    """Which keys each query sees: those not after it, within the window, and not on another branch.

    ``drafted_SD`` overrides causality for the last keys of a segment with a draft tree; there, a
    query sees exactly its ancestors and itself. ``chunked``: the window is the chunk that a query
    is in. bool ``[S, C]``.
    """
    distance = query_positions_S[:, None] - key_positions_C[None, :]
    seen = distance >= 0
    if drafted_SD is not None:
        width = drafted_SD.shape[1]
        seen = torch.cat([seen[:, :-width], drafted_SD], dim=1)
    if window is None:
        return seen
    if chunked:
        return seen & (query_positions_S[:, None] // window == key_positions_C // window)
    return seen & (distance < window)


def first_visible(position: int, window: int | None, *, chunked: bool = False) -> int:
    """The first position that one sees."""
    if window is None:
        return 0
    return position - position % window if chunked else max(0, position - window + 1)
