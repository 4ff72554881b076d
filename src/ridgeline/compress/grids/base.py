"""What a method of quantization needs of a grid.

Shapes: O outputs and I inputs of a matrix, G groups of its inputs, C some columns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Where the points of a grid lie for each group: value = points[code] · scale + offset.

    ``scales_OG`` and ``offsets_OG`` are float32, and exactly what the file will hold. ``parts`` are
    what it holds instead, ``[O, …]`` each, where they are products.
    """

    scales_OG: torch.Tensor
    offsets_OG: torch.Tensor | None = None
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def merged(
        all_steps: "Sequence[Steps]", merge: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> "Steps":
        """Steps each tensor of which is ``merge`` of those of some, which have the same ones."""
        offsets = [each.offsets_OG for each in all_steps if each.offsets_OG is not None]
        return Steps(
            scales_OG=merge([each.scales_OG for each in all_steps]),
            offsets_OG=merge(offsets) if offsets else None,
            parts={
                name: merge([each.parts[name] for each in all_steps]) for name in all_steps[0].parts
            },
        )

    def spread(
        self, columns_C: torch.Tensor, group_size: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scale and offset ``[O, C]`` of some columns."""
        groups = columns_C // group_size
        offsets = None if self.offsets_OG is None else self.offsets_OG[:, groups]
        return self.scales_OG[:, groups], offsets


class Grid(Protocol):
    """A set of numbers that weights of one group may take."""

    @property
    def name(self) -> str:
        """Names the grid with all its settings."""
        ...

    @property
    def bits(self) -> int:
        """Of a code."""
        ...

    @property
    def group_size(self) -> int:
        """Columns that share a scale, in the file."""
        ...

    def fit(self, w_OI: torch.Tensor, importance_I: torch.Tensor) -> Steps:
        """The steps with the least Σ importance · error², of those that are searched."""
        ...

    def codes(
        self, w: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        """The nearest codes, int16; all of one shape, or broadcast."""
        ...

    def values(
        self, codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        """What codes stand for, float32."""
        ...


def inverse(scales: torch.Tensor) -> torch.Tensor:
    """One over each scale; zero for zero, since all codes then mean the same."""
    return torch.where(scales == 0, torch.zeros_like(scales), 1.0 / scales)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 values that ``dtype`` holds."""
    return values.to(dtype).float()


def grouped(w_OI: torch.Tensor, size: int) -> torch.Tensor:
    """``[O, G, size]``, with zeros behind the last column."""
    missing = -w_OI.shape[-1] % size
    padded = torch.nn.functional.pad(w_OI, (0, missing)) if missing else w_OI
    return torch.unflatten(padded, -1, (-1, size))


def best_of(
    candidates: Iterable[tuple[torch.Tensor, ...]],
    error: Callable[..., torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Elementwise that candidate whose error is least; the first of equals."""
    found: tuple[torch.Tensor, ...] | None = None
    least = torch.empty(())
    for candidate in candidates:
        errors = error(*candidate)
        if found is None:
            found, least = candidate, errors
            continue
        better = errors < least
        found = tuple(
            torch.where(better, new, old) for new, old in zip(candidate, found, strict=True)
        )
        least = torch.where(better, errors, least)
    assert found is not None
    return found
