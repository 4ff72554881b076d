"""A pass on the device: what its ops read beside weights and KV."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ridgeline.core.rope_spec import RopeSpec
from ridgeline.kernels import reference


class SegmentTables:
    """Block tables of a pass's segments: rows of those of all slots.

    Attributes:
        of_slots: int32 ``[slots, M]``, by KV group.
        slots_S: int64, each segment's row.
    """

    def __init__(self, of_slots: Sequence[torch.Tensor], slots_S: torch.Tensor) -> None:
        self.of_slots, self.slots_S = of_slots, slots_S
        self._copies: dict[int, torch.Tensor] = {}
        self._within: tuple[SegmentTables, slice] | None = None

    def __getitem__(self, group: int) -> torch.Tensor:
        """``[S, M]`` of a group, copied for the first who asks."""
        if self._within is not None:
            whole, rows = self._within
            return whole[group][rows]
        if group not in self._copies:
            self._copies[group] = self.of_slots[group].index_select(0, self.slots_S)
        return self._copies[group]

    def part(self, first: int, last: int | None = None) -> "SegmentTables":
        """Those of segments ``[first, last)``, which share copies with all."""
        found = SegmentTables(self.of_slots, self.slots_S[first:last])
        found._within = self, slice(first, last)
        return found


class RopeRows(NamedTuple):
    """cos and sin, float32 ``[P, rotary_dim / 2]``, the row of each token, and the pairing."""

    cos: torch.Tensor
    sin: torch.Tensor
    rows_T: torch.Tensor
    interleaved: bool

    def rotate(self, x_THd: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The heads of some tokens, rotated from element ``start`` on."""
        tables = self.cos.index_select(0, self.rows_T), self.sin.index_select(0, self.rows_T)
        return reference.rotate(x_THd, tables, start=start, interleaved=self.interleaved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One segment's rows ``[first, last)`` of a pass, which are KV slots ``[start, stop)``.

    ``parents`` are those of its last tokens, if these are a tree of drafts.
    """

    first: int
    last: int
    start: int
    stop: int
    parents: tuple[int, ...] = ()
    adapter: int = 0


class Short(NamedTuple):
    """How many segments, how many tokens they have together, and the most that one has."""

    segments: int
    tokens: int
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Which drafts each token sees, for the segments whose drafts are trees.

    Attributes:
        num_drafts_S: int32, of each segment; 0 for a chain.
        ancestors_T: int64 bits, the token's own draft included.
        positions_T: int32.
    """

    num_drafts_S: torch.Tensor
    ancestors_T: torch.Tensor
    positions_T: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PassInput:
    """Tensors on the device, and bounds that the host knows.

    Attributes:
        token_ids_T: int64, every one a token.
        positions_T: int64.
        query_starts_S1: int32, where each segment's rows begin, and their number.
        stops_S: int32, KV slots of each segment, the pass's own included.
        tables: block tables.
        slots: int64 ``[T]``, the flat slot ``block · B + offset`` of each token, by KV group.
        rope: by rotary scheme.
        short: the first segments, those of few tokens, whose attention is that of decode steps.
        tree: if drafts of a segment are a tree.
        spans: the segments, where the host knows them; a recorded decode step has none.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    query_starts_S1: torch.Tensor
    stops_S: torch.Tensor
    tables: SegmentTables
    slots: Sequence[torch.Tensor]
    rope: Mapping[RopeSpec, RopeRows]
    short: Short
    tree: Tree | None = None
    spans: tuple[Span, ...] | None = None
