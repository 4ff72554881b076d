"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864)."""

import torch

from ridgeline.core.rope_spec import DynamicScaling, RopeSpec
from ridgeline.models import inverse_frequencies, rope_attention_factor


def rope_tables(
    spec: RopeSpec, positions_T: torch.Tensor, lengths_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 ``[T, rotary_dim / 2]``.

    ``lengths_T`` is the length of the sequence that each token sees; only scalings that depend on
    it (dynamic) read it. Tables are float32 in every executor, as checkpoints were trained.
    """
    angles = torch.empty(len(positions_T), spec.rotary_dim // 2)
    depends = isinstance(spec.scaling, DynamicScaling)
    lengths_T = lengths_T if depends else torch.zeros_like(lengths_T)
    for length in torch.unique(lengths_T).tolist():
        rows = lengths_T == length
        frequencies = torch.from_numpy(inverse_frequencies(spec, sequence_length=length))
        angles[rows] = positions_T[rows].float()[:, None] * frequencies
    factor = rope_attention_factor(spec)
    return angles.cos() * factor, angles.sin() * factor


def rotate(
    x_THd: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    *,
    start: int = 0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Rotate ``rotary_dim`` elements of each head from ``start`` on; the rest pass through.

    Elements i and i + rotary_dim / 2 are a pair, or neighbours if ``interleaved``; either way the
    pair of a frequency stays where it is.
    """
    cos, sin = (table.to(x_THd.dtype)[:, None, :] for table in tables)
    half = cos.shape[-1]
    before, x, after = x_THd.tensor_split((start, start + 2 * half), dim=-1)
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :half], x[..., half:]
    turned = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([before, rotated, after], dim=-1)
