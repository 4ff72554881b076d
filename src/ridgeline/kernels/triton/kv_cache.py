"""Where K and V lie on the GPU.

The pool of a KV group is bytes ``[N, L, layer_bytes]``: a block holds all layers of its group, so
that a block is copied, exported and imported as one contiguous range. A layer of a block is

====================  =====================================================
K                     ``[K, B, d]``
V                     ``[K, B, v]``; nothing for latents, whose V is part of K
K scales, V scales    float32 ``[K, B]`` each, for int8 and float8 only: value = scale · code
====================  =====================================================

padded to 128 bytes. A head's tokens are contiguous, which is what a program of attention reads.

Shapes: N blocks, L layers, K KV heads, B tokens of a block, d and v widths of a head of K and V.
"""

from dataclasses import dataclass

import torch

from ridgeline.core.rounding import round_up

_ALIGNMENT = 128
QUANTIZED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # dtype: its largest code


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTensors:
    """K ``[N, K, B, d]`` and V ``[N, K, B, v]`` of one layer; if quantized, scales ``[N, K, B]``.

    Views of the pool, strided over blocks. Latents: one head, and V is the first elements of K.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None

    @property
    def is_latent(self) -> bool:
        """Whether V is part of K."""
        return self.k.data_ptr() == self.v.data_ptr()

    @property
    def block_tokens(self) -> int:
        return self.k.shape[2]


def layer_bytes(
    dtype: torch.dtype, *, num_kv_heads: int, block_tokens: int, k_width: int, v_width: int
) -> int:
    """Bytes of one layer of one block."""
    tokens = num_kv_heads * block_tokens
    size = tokens * (k_width + v_width) * dtype.itemsize
    if dtype in QUANTIZED:
        size = round_up(size, 4) + tokens * 4 * (2 if v_width else 1)
    return round_up(size, _ALIGNMENT)


def layer_tensors(
    pool_Nb: torch.Tensor,
    dtype: torch.dtype,
    *,
    num_kv_heads: int,
    block_tokens: int,
    k_width: int,
    v_width: int,
    latent_dim: int | None = None,
) -> KVTensors:
    """The views of one layer in bytes ``[N, layer_bytes]``, which may be strided over blocks.

    ``latent_dim`` is how much of K is V where ``v_width`` is 0.
    """
    tokens = num_kv_heads * block_tokens
    offset = 0

    def take(kind: torch.dtype, width: int | None) -> torch.Tensor:
        nonlocal offset
        offset = round_up(offset, kind.itemsize)
        size = tokens * (width or 1) * kind.itemsize
        part = pool_Nb[:, offset : offset + size].view(kind)
        offset += size
        shape = (
            (num_kv_heads, block_tokens) if width is None else (num_kv_heads, block_tokens, width)
        )
        heads: torch.Tensor = part.unflatten(1, shape)
        return heads

    k = take(dtype, k_width)
    v = take(dtype, v_width) if v_width else k[..., :latent_dim]
    if dtype not in QUANTIZED:
        return KVTensors(k=k, v=v)
    k_scales = take(torch.float32, None)
    v_scales = take(torch.float32, None) if v_width else k_scales
    return KVTensors(k=k, v=v, k_scales=k_scales, v_scales=v_scales)


def move_slots(kv: KVTensors, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy tokens between flat slots ``block · B + offset`` (int64 ``[n]``); all are read first."""
    tensors = [kv.k, kv.k_scales]
    if not kv.is_latent:
        tensors += [kv.v, kv.v_scales]
    blocks, offsets = sources // kv.block_tokens, sources % kv.block_tokens
    to_blocks, to_offsets = targets // kv.block_tokens, targets % kv.block_tokens
    for tensor in tensors:
        if tensor is not None:
            raw = tensor.view(torch.uint8) if tensor.dtype in QUANTIZED else tensor
            raw[to_blocks, :, to_offsets] = raw[blocks, :, offsets]
