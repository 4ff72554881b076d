"""What a drafter reads of the target's hidden states, and of its own: kept by sequence.

A row of the drafter has the features of the position before its token's. Until the target has
verified them, tokens that were drafted have none of the target's, and get the drafter's own.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.ops import JoinFeatures, KeepFeatures, ReadFeatures
from ridgeline.core.plan import ModelRole, Segment
from ridgeline.decoding import depths

if TYPE_CHECKING:
    from ridgeline.executors.outputs import SegmentContext


class SequenceFeatures:
    """Of one sequence: ``rows[n, W]`` of the target's last pass, that of position ``first`` before
    all others, and ``own[m, D]`` of the drafter's: of its last token, and of the drafts after it.
    """

    def __init__(self) -> None:
        self.first = 0
        self._rows: Array | None = None
        self._own: Array | None = None

    @property
    def last(self) -> int:
        """The last position of which there are features of the target's."""
        return self.first - 1 + (0 if self._rows is None else len(self._rows))

    def take(self, role: ModelRole, segment: Segment, rows: Array) -> None:
        """What a pass kept of each of a segment's tokens."""
        if role is ModelRole.TARGET:
            self.first, self._rows = segment.start, rows
        else:
            self._own = rows[segment.num_tokens - segment.num_drafts - 1 :]

    def verified(self, segment: Segment, accepted: Sequence[int]) -> None:
        """Forget what the target kept of drafts that it did not accept."""
        if self._rows is not None and segment.num_drafts:
            num_known = segment.num_tokens - segment.num_drafts
            kept = [*range(num_known), *(num_known + node for node in accepted)]
            self._rows = self._rows[kept]

    def read(self, segment: Segment, features: Array, x: Array, *, alike: bool) -> None:
        """Fill the rows of a segment of the drafter's, whose first token is not the sequence's."""
        x[:] = 0
        num_known = segment.num_tokens - segment.num_drafts
        first = segment.start - 1 - self.first
        assert first >= 0, "features that no pass has kept"
        found = () if self._rows is None else self._rows[first : first + num_known]
        own = list(range(len(found), segment.num_tokens))
        if len(found):
            features[: len(found)] = found
        if own:
            assert self._own is not None, "features that no pass has kept"
            assert len(found) + 1 >= num_known, "more than one token without the target's features"
            # Row 0 of its own is of the last token before the drafts.
            parents = [-1] * (num_known - len(found)) + list(segment.parents)
            features[own] = 0
            (features if alike else x)[own] = self._own[[node + 1 for node in parents]]


class PassFeatures:
    """Of all sequences of one pass: what its ops keep and read."""

    def __init__(self, items: "Sequence[SegmentContext]", role: ModelRole) -> None:
        self._items, self._role = items, role
        self._kept: Array | None = None

    def keep(self, op: KeepFeatures, rows_TD: Array) -> None:
        if self._kept is None:
            self._kept = np.empty((len(rows_TD), op.total), dtype=rows_TD.dtype)
        self._kept[:, op.first : op.first + op.width] = rows_TD[:, : op.width]

    def read(self, op: ReadFeatures, features_TW: Array, x_TD: Array) -> None:
        for item, rows in self._ranges():
            features, x = features_TW[rows, : op.width], x_TD[rows, : op.hidden_size]
            item.state.features.read(item.segment, features, x, alike=op.alike)

    @staticmethod
    def join(op: JoinFeatures, inner_TW: Array, first_TD: Array, second_TD: Array) -> None:
        width = op.hidden_size
        inner_TW[:, :width] = first_TD[:, :width]
        inner_TW[:, width : 2 * width] = second_TD[:, :width]

    def store(self) -> None:
        """The pass is done: what it kept is its sequences'."""
        if self._kept is not None:
            for item, rows in self._ranges():
                item.state.features.take(self._role, item.segment, self._kept[rows])

    def _ranges(self) -> "Iterator[tuple[SegmentContext, slice]]":
        first = 0
        for item in self._items:
            stop = first + item.segment.num_tokens
            yield item, slice(first, stop)
            first = stop


def depths_of_rows(items: "Sequence[SegmentContext]") -> list[int]:
    """By row of a drafter's pass, how many drafts there are before its token and with it."""
    found = list[int]()
    for item in items:
        segment = item.segment
        num_known = segment.num_tokens - segment.num_drafts
        first = segment.start - 1 - item.state.features.last
        found += [max(0, first + row) for row in range(num_known)]
        found += [found[-1] + depth for depth in depths(segment.parents)]
    return found


def on_whole_vocabulary(logits_NR: Array, token_ids_R: Array, vocab_size: int) -> Array:
    """Logits ``[N, V]`` of a drafter that has some of the target's tokens; −∞ for the others."""
    logits_NV = np.full((len(logits_NR), vocab_size), -np.inf, dtype=logits_NR.dtype)
    logits_NV[:, token_ids_R] = logits_NR
    return logits_NV
