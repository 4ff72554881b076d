"""A pass turned into tensors.

Shapes: T tokens of the pass, S tokens and C visible KV slots of one segment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ridgeline.core.plan import ModelRole, Segment
from ridgeline.decoding import ancestors, depths
from ridgeline.executors.outputs import SegmentContext
from ridgeline.executors.reference.token_ops import Tokens
from ridgeline.executors.state import SequenceState


@dataclass(frozen=True, kw_only=True)
class SegmentInput(SegmentContext):
    """A segment with what attention needs to know of it; its rows are ``kv_start`` and on in KV.

    ``kv_positions_C``: position of each KV slot ``[0, stop)``. ``drafted_SD``: which of the D
    drafted KV slots each of the S tokens sees, for trees.
    """

    kv_positions_C: torch.Tensor
    drafted_SD: torch.Tensor | None
    kv_start: int

    @property
    def kv_stop(self) -> int:
        return self.kv_start + self.segment.num_tokens

    @property
    def positions(self) -> list[int]:
        """Position of each of the segment's tokens, in KV."""
        return self.kv_positions_C[self.kv_start :].tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs of one forward pass; segments lie one after the other."""

    role: ModelRole
    segments: tuple[SegmentInput, ...]
    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    rope_lengths_T: torch.Tensor
    types_T: torch.Tensor

    def tokens(self) -> Tokens:
        """What ops on single tokens need."""
        adapters = [
            (item.state.admission.adapter, first, last) for item, first, last in self.ranges()
        ]
        return Tokens(
            self.token_ids_T, self.positions_T, self.rope_lengths_T, adapters, self.types_T
        )

    def ranges(self) -> list[tuple[SegmentInput, int, int]]:
        """Each segment with its half-open range of rows."""
        result, first = [], 0
        for item in self.segments:
            result.append((item, first, first + item.segment.num_tokens))
            first += item.segment.num_tokens
        return result


def build_batch(
    segments: Sequence[Segment],
    states: Mapping[int, SequenceState],
    role: ModelRole,
    *,
    is_head: bool = False,
) -> Batch:
    """Tensors for one forward pass over segments whose references are resolved.

    Applies block-table updates and records known tokens in the states. Of a drafter that reads
    hidden states (``is_head``) a token is at the position before its own, whose features it has.
    """
    inputs = []
    for segment in segments:
        state = states[segment.slot]
        for update in segment.block_updates:
            state.update_table(role, update)
        known = segment.token_ids[: segment.num_tokens - segment.num_drafts]
        state.set_tokens(role, segment.start, known)
        inputs.append(_segment_input(segment, state, role, int(is_head)))
    flat = [(item.state, position) for item in inputs for position in item.positions]
    return Batch(
        role=role,
        segments=tuple(inputs),
        token_ids_T=torch.tensor([token for segment in segments for token in segment.token_ids]),
        positions_T=torch.tensor([position for _, position in flat]),
        rope_lengths_T=torch.tensor([state.rope_length(position) for state, position in flat]),
        types_T=torch.tensor([state.token_type(position) for state, position in flat]),
    )


def _segment_input(
    segment: Segment, state: SequenceState, role: ModelRole, shift: int
) -> SegmentInput:
    start, stop = segment.start - shift, segment.stop - shift
    first_draft = stop - segment.num_drafts
    positions = torch.arange(stop)
    drafted = None
    if segment.parents:
        positions[first_draft:] = torch.tensor(depths(segment.parents)) + first_draft - 1
        drafted = torch.zeros(segment.num_tokens, segment.num_drafts, dtype=torch.bool)
        for node in range(segment.num_drafts):
            row = first_draft - start + node
            drafted[row, list(ancestors(segment.parents, node))] = True
    return SegmentInput(
        segment=segment,
        state=state,
        known=state.known(role),
        kv_positions_C=positions,
        drafted_SD=drafted,
        kv_start=start,
    )
