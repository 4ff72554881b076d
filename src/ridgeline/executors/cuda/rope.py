"""Rotary tables on the device."""

from collections.abc import Sequence

import torch

from ridgeline.core.rope_spec import DynamicScaling, RopeSpec
from ridgeline.executors.cuda.inputs import RopeRows
from ridgeline.kernels import reference


class RopeTables:
    """cos and sin for every rotary scheme of a model, of all positions where that can be."""

    def __init__(self, specs: Sequence[RopeSpec], num_positions: int, device: torch.device) -> None:
        self._specs, self._device = specs, device
        positions = torch.arange(num_positions)
        self._fixed = {
            spec: self._tables(spec, positions, torch.zeros_like(positions))
            for spec in specs
            if not _by_length(spec)
        }

    @property
    def needs_lengths(self) -> bool:
        """Whether frequencies depend on how long sequences are, which only the host knows."""
        return len(self._fixed) < len(self._specs)

    def of(
        self,
        positions_T: torch.Tensor,
        known: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> dict[RopeSpec, RopeRows]:
        """The tables and rows of a pass.

        ``known``: the positions, and the length of sequence that each token sees, on the host.
        """
        found: dict[RopeSpec, RopeRows] = {}
        for spec in self._specs:
            if spec in self._fixed:
                found[spec] = RopeRows(*self._fixed[spec], positions_T, spec.interleaved)
            else:
                assert known is not None
                positions, lengths = map(torch.tensor, known)
                rows = torch.arange(len(positions), device=self._device)
                tables = self._tables(spec, positions, lengths)
                found[spec] = RopeRows(*tables, rows, spec.interleaved)
        return found

    def _tables(
        self, spec: RopeSpec, positions: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = reference.rope_tables(spec, positions, lengths)
        return cos.to(self._device), sin.to(self._device)


def _by_length(spec: RopeSpec) -> bool:
    return isinstance(spec.scaling, DynamicScaling)
