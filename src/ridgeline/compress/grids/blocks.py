"""The grids of GGUF's blocks, whose scales are those of the encoders that write them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.compress.grids.base import Steps, inverse
from ridgeline.quant.gguf_encoders import Encoder
from ridgeline.quant.gguf_search import Fit

_OF_BLOCKS = ("d", "d_min")  # parts of a fit that a block has once; others its groups have


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """One format. Rows are whole blocks."""

    encoder: Encoder

    @property
    def name(self) -> str:
        return self.encoder.format.name

    @property
    def bits(self) -> int:
        return (self.encoder.high - self.encoder.low).bit_length()

    @property
    def group_size(self) -> int:
        return self.encoder.group

    def fit(self, w_OI: torch.Tensor, importance_I: torch.Tensor) -> Steps:
        shape, size = w_OI.shape, self.encoder.format.block_elements
        weights = importance_I.clamp(min=0).expand(shape).reshape(-1, size)
        with np.errstate(all="ignore"):  # scales of zeros
            fit = self.encoder.fit(
                w_OI.reshape(-1, size).numpy(), np.ascontiguousarray(weights.numpy())
            )
        parts = {
            name: self._by_row(values, shape[0])
            for name in ("d", "d_min", "scales", "mins")
            if (values := getattr(fit, name)) is not None
        }
        offsets = fit.offset
        return Steps(
            scales_OG=self._by_row(fit.step, shape[0]),
            offsets_OG=None if offsets is None else -self._by_row(offsets, shape[0]),
            parts=parts,
        )

    def codes(
        self, w: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        shifted = w if offsets is None else w - offsets
        codes = (shifted * inverse(scales)).round()
        return codes.clamp_(self.encoder.low, self.encoder.high).to(torch.int16)

    def values(
        self, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        values = codes * scales
        return values if offsets is None else values + offsets

    def pack(self, codes_OI: torch.Tensor, steps: Steps) -> torch.Tensor:
        """The blocks of each row, uint8 ``[O, row_bytes]``."""
        arrays: dict[str, Any] = {n: self._by_block(n, part) for n, part in steps.parts.items()}
        fit = Fit(**arrays)
        codes = codes_OI.to(torch.int8).reshape(-1, self.encoder.format.block_elements)
        blocks = self.encoder.pack(codes.numpy(), fit)
        return torch.from_numpy(blocks.reshape(len(codes_OI), -1))

    @staticmethod
    def _by_row(values: npt.NDArray[np.generic], rows: int) -> torch.Tensor:
        """``[O, …]`` of ``[N]`` blocks, or ``[S, N]`` groups of blocks."""
        return torch.from_numpy(np.ascontiguousarray(values.T)).reshape(rows, -1)

    def _by_block(self, name: str, part: torch.Tensor) -> npt.NDArray[np.generic]:
        if name in _OF_BLOCKS:
            return part.reshape(-1).numpy()
        groups = self.encoder.format.block_elements // self.encoder.group
        return np.ascontiguousarray(part.reshape(-1, groups).T.numpy())
