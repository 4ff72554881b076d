"""Multi-head latent attention of one segment over its cached latents, in two forms.

Shapes: S tokens of the segment, C context, H heads, R latent elements, n and r the widths of a
head's parts without and with rotary positions, v the width of a head of V.
"""

import torch

from ridgeline.kernels.reference.attention import attend
from ridgeline.kernels.reference.elementwise import wide


def attend_plain(
    q_SHd: torch.Tensor,
    latent_CW: torch.Tensor,
    expand_HER: torch.Tensor,
    visible_SC: torch.Tensor,
    *,
    rope_dim: int,
    scale: float,
) -> torch.Tensor:
    """Attention output ``[S, H, v]`` by expanding K and V of all heads from the latents.

    ``q_SHd``: n elements and then r rotated ones of each head; ``latent_CW``: R and then r;
    ``expand_HER``: each head's rows, n for K and v for V (DeepSeek-V2, equations 9 to 19).
    """
    nope_dim = q_SHd.shape[-1] - rope_dim
    latent_CR, rope_Cr = _split(latent_CW, rope_dim)
    expanded_CHE = torch.einsum("cr,her->che", wide(latent_CR), wide(expand_HER))
    rope_CHr = wide(rope_Cr)[:, None].expand(-1, q_SHd.shape[1], -1)
    k_CHd = torch.cat([expanded_CHE[..., :nope_dim], rope_CHr], dim=-1)
    v_CHv = expanded_CHE[..., nope_dim:]
    return attend(wide(q_SHd), k_CHd, v_CHv, visible_SC, scale=scale).to(q_SHd.dtype)


def attend_absorbed(
    q_SHd: torch.Tensor,
    latent_CW: torch.Tensor,
    expand_HER: torch.Tensor,
    visible_SC: torch.Tensor,
    *,
    rope_dim: int,
    scale: float,
) -> torch.Tensor:
    """The same in the space of latents: q·(W c) = (Wᵀ q)·c, and Σ p (W c) = W Σ p c.

    One KV head of R + r elements serves all heads, and nothing is expanded (DeepSeek-V2, §2.1.2).
    """
    nope_dim = q_SHd.shape[-1] - rope_dim
    q_SHn, q_SHr = _split(q_SHd, rope_dim)
    up_HnR, out_HvR = wide(expand_HER[:, :nope_dim]), wide(expand_HER[:, nope_dim:])
    q_SHR = torch.einsum("shn,hnr->shr", wide(q_SHn), up_HnR)
    latent_CR, _ = _split(latent_CW, rope_dim)
    q_SHW = torch.cat([q_SHR, wide(q_SHr)], dim=-1)
    mixed_SHR = attend(
        q_SHW, wide(latent_CW)[:, None], wide(latent_CR)[:, None], visible_SC, scale=scale
    )
    return torch.einsum("shr,hvr->shv", mixed_SHR, out_HvR).to(q_SHd.dtype)


def absorbing_is_cheaper(
    *, num_tokens: int, context: int, latent_dim: int, nope_dim: int, rope_dim: int, v_dim: int
) -> bool:
    """Whether the absorbed form takes fewer multiplications, counted per head."""
    projection = latent_dim * (nope_dim + v_dim)
    plain = context * projection + num_tokens * context * (nope_dim + rope_dim + v_dim)
    absorbed = num_tokens * projection + num_tokens * context * (2 * latent_dim + rope_dim)
    return absorbed < plain


def _split(x: torch.Tensor, rope_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last axis without its last ``rope_dim`` elements, and these."""
    return x[..., :-rope_dim], x[..., -rope_dim:]
