"""One kind of attention op by an installed package, of a pass as the kernels take it."""

from dataclasses import dataclass

import torch

from ridgeline.core import ops
from ridgeline.executors.cuda.inputs import PassInput
from ridgeline.kernels.flash_attention import FlashAttention, Masking, Sequences
from ridgeline.kernels.triton import KVTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedAttention:
    """``[T, H, d]`` of q ``[T, H, d]``, in q's type; ``group`` is that of the KV."""

    package: FlashAttention
    group: int
    masking: Masking

    @classmethod
    def of(cls, package: FlashAttention, op: ops.Attend) -> "PackagedAttention":
        masking = Masking(scale=op.scale, window=op.window, softcap=op.softcap)
        return cls(package=package, group=op.group, masking=masking)

    def decode(self, q_SHd: torch.Tensor, kv: KVTensors, at: PassInput) -> torch.Tensor:
        """Of a pass with one token of each sequence."""
        q = q_SHd.to(kv.k.dtype)
        out = self.package.decode(q, kv.k, kv.v, self._sequences(at), self.masking)
        return out.to(q_SHd.dtype)

    def prefill(self, q_THd: torch.Tensor, kv: KVTensors, at: PassInput) -> torch.Tensor:
        """Of a pass whose segments the host knows."""
        assert at.spans is not None, "prompts are not recorded"
        return self.package.prefill(
            q_THd.to(kv.k.dtype),
            kv.k,
            kv.v,
            self._sequences(at),
            self.masking,
            query_starts_S1=at.query_starts_S1,
            longest=max(span.last - span.first for span in at.spans),
        ).to(q_THd.dtype)

    def _sequences(self, at: PassInput) -> Sequences:
        return Sequences(tables_SP=at.tables[self.group], lengths_S=at.stops_S)


def misfit(
    package: FlashAttention, op: ops.Attend, kv_dtype: torch.dtype, block_tokens: int
) -> str | None:
    """See `FlashAttention.misfit`."""
    return package.misfit(
        kv_dtype=kv_dtype,
        block_tokens=block_tokens,
        head_dim=op.head_dim,
        has_sinks=op.sinks is not None,
    )
