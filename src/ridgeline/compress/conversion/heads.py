"""The heads of a layer as vectors that can be merged, and merging those of its weights.

Shapes: R rows, n heads of d elements, and B, m, N as `merging` has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ridgeline.compress.conversion.merging import fit, merge, restore
from ridgeline.core.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of each head that are merged alike.

    ``pairs``: the elements ``real[i]`` and ``imaginary[i]`` are a complex number, a part of width 1
    for each i. Otherwise ``real`` are one part.
    """

    real: torch.Tensor
    imaginary: torch.Tensor | None = None

    @property
    def width(self) -> int:
        return len(self.real) if self.imaginary is None else 1

    def take(self, x_Rnd: torch.Tensor) -> torch.Tensor:
        """``[B, N, R]``: the heads one behind the other."""
        real_Rnm = x_Rnd[..., self.real]
        if self.imaginary is None:
            return real_Rnm.flatten(1).T[None]
        return torch.complex(real_Rnm, x_Rnd[..., self.imaginary]).movedim(0, -1).movedim(1, 0)

    def put(self, z_BNR: torch.Tensor, into_Rnd: torch.Tensor) -> None:
        """The inverse of `take`."""
        if self.imaginary is None:
            into_Rnd[..., self.real] = torch.unflatten(z_BNR[0].T, 1, (-1, len(self.real)))
            return
        x_RnB = z_BNR.movedim(0, 1).movedim(-1, 0)
        into_Rnd[..., self.real], into_Rnd[..., self.imaginary] = x_RnB.real, x_RnB.imag


def key_parts(spec: AttentionSpec) -> tuple[Part, ...]:
    """Rotary pairs, and what positions leave as it is."""
    rotary = 0 if spec.rope is None else spec.rope.rotary_dim
    parts: list[Part] = []
    if spec.rope is not None:
        elements = torch.arange(rotary)
        halves = elements.view(-1, 2).T if spec.rope.interleaved else elements.view(2, -1)
        parts.append(Part(halves[0], halves[1]))
    if rotary < spec.head_dim:
        parts.append(Part(torch.arange(rotary, spec.head_dim)))
    return tuple(parts)


def value_parts(spec: AttentionSpec) -> tuple[Part, ...]:
    """All elements together."""
    return (Part(torch.arange(spec.head_dim)),)


class Moments:
    """The mean of z zᴴ of each part of heads, over the tokens added, in float64."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._sums: list[torch.Tensor | None] = [None] * len(parts)
        self._num_tokens = 0

    def add(self, x_Tnd: torch.Tensor) -> None:
        self._num_tokens += len(x_Tnd)
        for place, part in enumerate(self.parts):
            z_BNT = part.take(x_Tnd.double())
            found, before = z_BNT @ z_BNT.mH, self._sums[place]
            self._sums[place] = found if before is None else before + found

    def of(self, part: int) -> torch.Tensor:
        """``[B, N, N]`` of all heads."""
        found = self._sums[part]
        assert found is not None, "no token was seen"
        return found / self._num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """What becomes of a group of heads, by part: ``down`` makes the new head of the old ones (it is
    empty if that is another layer's), ``up`` gives them back."""

    down: tuple[torch.Tensor, ...]
    up: tuple[torch.Tensor, ...]

    def turn(self, place: int) -> tuple[torch.Tensor, ...]:
        """``[B, m, m]`` for the queries of the head at ``place``, which then meet the new key as
        they did the old one, and for its columns of the output projection."""
        widths = (up_BNm.shape[-1] for up_BNm in self.up)
        return tuple(
            up_BNm[:, place * width : (place + 1) * width].mH
            for up_BNm, width in zip(self.up, widths, strict=True)
        )


def merged(moments: Moments, readers: Moments, heads: Sequence[int], method: str) -> Merge:
    """Heads of a layer become one. ``readers`` are what they are multiplied with, some for each
    head: queries, or rows of the output projection."""
    down, up = [], []
    for place, part in enumerate(moments.parts):
        rows = rows_of(heads, part.width)
        found_BNN = moments.of(place)[:, rows][:, :, rows]
        if method == "principal":  # of what the readers make of them
            root_BNN = _root(readers.of(place), moments.of(place).shape[1], heads, part.width)
            down_BmN = merge(root_BNN @ found_BNN @ root_BNN.mH, part.width, method) @ root_BNN
        else:
            down_BmN = merge(found_BNN, part.width, method)
        down.append(down_BmN)
        up.append(
            unchanged(down_BmN, len(heads))
            if method in ("mean", "first")
            else restore(found_BNN, down_BmN)
        )
    return Merge(down=tuple(down), up=tuple(up))


def read_from(moments: Moments, heads: Sequence[int], other: int, method: str) -> Merge:
    """Heads of a layer become the head ``other`` of another, which is in ``moments``, too."""
    up = []
    for place, part in enumerate(moments.parts):
        found = moments.of(place)
        own, theirs = rows_of(heads, part.width), rows_of([other], part.width)
        up.append(
            unchanged(found[:, theirs], len(heads))
            if method in ("mean", "first")
            else fit(found[:, own][:, :, theirs], found[:, theirs][:, :, theirs])
        )
    return Merge(down=(), up=tuple(up))


def _root(readers_BMM: torch.Tensor, total: int, heads: Sequence[int], width: int) -> torch.Tensor:
    """R ``[B, N, N]`` with |Rz|² what the readers of each head make of z, on the whole."""
    each = readers_BMM.shape[1] // total
    parts = len(readers_BMM)
    found = torch.zeros(parts, len(heads) * width, len(heads) * width, dtype=readers_BMM.dtype)
    for place, head in enumerate(heads):
        rows = slice(place * width, (place + 1) * width)
        for reader in range(head * each, (head + 1) * each):
            own = slice(reader * width, (reader + 1) * width)
            found[:, rows, rows] += readers_BMM[:, own, own]
    diagonal_BN = found.diagonal(dim1=1, dim2=2)
    diagonal_BN += 1e-4 * diagonal_BN.mean(1, keepdim=True) + 1e-30
    root: torch.Tensor = torch.linalg.cholesky(found).mH
    return root


def rows_of(heads: Sequence[int], width: int) -> torch.Tensor:
    """The rows of heads that lie one behind the other."""
    return torch.cat([torch.arange(head * width, (head + 1) * width) for head in heads])


def unchanged(like: torch.Tensor, count: int) -> torch.Tensor:
    """``[B, N, m]``: each head is the new one as it is."""
    eye = torch.eye(like.shape[1], dtype=like.dtype).expand(len(like), -1, -1)
    return torch.cat([eye] * count, dim=1)


def mix(
    parts: Sequence[Part], matrices: Sequence[torch.Tensor], x_Rnd: torch.Tensor
) -> torch.Tensor:
    """``[R, 1, d]``: one head, the product of each part of some with its matrix ``[B, m, N]``."""
    out_R1d = torch.zeros(len(x_Rnd), 1, x_Rnd.shape[-1], dtype=torch.float64)
    for part, matrix in zip(parts, matrices, strict=True):
        part.put(matrix @ part.take(x_Rnd.double()), out_R1d)
    return out_R1d.float()
