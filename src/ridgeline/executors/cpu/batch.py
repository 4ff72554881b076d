"""A pass's segments as the arrays that the native program reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.core.context_ranks import context_cuts, is_shared
from ridgeline.core.plan import ModelRole, Segment
from ridgeline.decoding import ancestors, depths
from ridgeline.executors.cpu.kv_cache import KVCache
from ridgeline.executors.cpu.state import CPUSequence
from ridgeline.executors.outputs import SegmentContext, num_sampled_rows
from ridgeline.kernels.cpu.structs import SEQUENCE, STATE_SAVE, RlBatch

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class CPUBatch:
    """Inputs of one forward pass; segments lie one after the other.

    ``logit_rows`` are the rows of the batch whose logits are kept, segment by segment. Where ranks
    share contexts these and ``num_rows`` are of all ranks' tokens, and the others of this rank's.
    ``num_rows`` has those of tokens that lag, too, which are the last.
    """

    role: ModelRole
    items: tuple[SegmentContext, ...]
    states: tuple[CPUSequence, ...]
    token_ids: Ints
    positions: Ints
    token_types: Ints
    sequences: npt.NDArray[np.void]
    logit_rows: Ints
    num_rows: int
    kept: list[Any] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_own(self) -> list[int]:
        """Of each segment the tokens that are computed here."""
        counts: list[int] = self.sequences["num_tokens"].tolist()
        return counts

    def struct(self) -> RlBatch:
        return RlBatch(
            num_tokens=len(self.token_ids),
            num_sequences=len(self.items),
            token_ids=self.token_ids.ctypes.data,
            positions=self.positions.ctypes.data,
            sequences=self.sequences.ctypes.data,
            token_types=self.token_types.ctypes.data,
        )


def num_kept_rows(segment: Segment) -> int:
    """Of how many of a segment's last rows the logits are all in memory at once."""
    return segment.num_tokens if segment.outputs.logits else num_sampled_rows(segment)


def build_batch(
    segments: Sequence[Segment],
    states: Mapping[int, CPUSequence],
    role: ModelRole,
    cache: KVCache,
    *,
    state_inputs: int = 0,
    is_head: bool = False,
) -> CPUBatch:
    """Arrays for one forward pass over segments whose references are resolved.

    Applies block-table updates and records known tokens in the states. Ops on states read
    ``state_inputs`` floats of a token. Of a drafter that reads
    hidden states (``is_head``) a token is at the position before its own, whose features it has.
    """
    owners = tuple(states[segment.slot] for segment in segments)
    items, rows = [], []
    positions: list[int] = []
    token_ids: list[int] = []
    logit_rows: list[int] = []
    kept: list[Any] = []
    first_row = 0
    lag_row = sum(segment.num_tokens for segment in segments)
    own_row, own_rows = 0, list[range]()
    for segment, state in zip(segments, owners, strict=True):
        for update in segment.block_updates:
            state.update_table(role, update)
        known = segment.token_ids[: segment.num_tokens - segment.num_drafts]
        state.set_tokens(role, segment.start, known)
        items.append(SegmentContext(segment=segment, state=state, known=state.known(role)))
        start, stop, cuts = _own_range(segment, cache, kept)
        rows.append(
            (
                own_row,
                stop - start,
                start - is_head,
                segment.num_drafts,
                _keep(_ancestor_bits(segment), kept) if segment.parents else 0,
                state.table_pointers(role),
                *(_states(segment, state, role, cache, kept) if cache.has_states else (0, 0)),
                len(segment.state_saves),
                segment.state_lag,
                lag_row,
                *(state.state_inputs(segment.num_drafts, state_inputs) if state_inputs else (0, 0)),
                *(segment.window or (0, 0)),
                cuts,
                first_row,
            )
        )
        lag_row += segment.state_lag
        own_row += stop - start
        own_rows.append(range(first_row + start - segment.start, first_row + stop - segment.start))
        token_ids.extend(segment.token_ids)
        positions.extend(position - is_head for position in _positions(segment))
        stop = first_row + segment.num_tokens
        logit_rows.extend(range(stop - num_kept_rows(segment), stop))
        first_row = stop
    of_tokens = [
        np.array(token_ids, dtype=np.int32),
        np.array(positions, dtype=np.int32),
        _token_types(owners, segments, first_row),
    ]
    if own_row < first_row:
        here = np.concatenate(own_rows)
        of_tokens = [each[here] for each in of_tokens]
    ids, at, types = of_tokens
    return CPUBatch(
        role=role,
        items=tuple(items),
        states=owners,
        token_ids=ids,
        positions=at,
        token_types=types,
        sequences=np.array(rows, dtype=SEQUENCE),
        logit_rows=np.array(logit_rows, dtype=np.int32),
        num_rows=lag_row,
        kept=kept,
    )


def _token_types(
    states: Sequence[CPUSequence], segments: Sequence[Segment], num_tokens: int
) -> Ints:
    types, row = np.zeros(num_tokens, dtype=np.int32), 0
    for state, segment in zip(states, segments, strict=True):
        stop = row + segment.num_tokens
        second = state.admission.second_start
        if second is not None:
            types[min(row + max(second - segment.start, 0), stop) : stop] = 1
        row = stop
    return types


def _positions(segment: Segment) -> Sequence[int]:
    if not segment.parents:
        return range(segment.start, segment.stop)
    first_draft = segment.stop - segment.num_drafts
    drafted = (first_draft + depth - 1 for depth in depths(segment.parents))
    return [*range(segment.start, first_draft), *drafted]


def _keep(array: npt.NDArray[Any], kept: list[Any]) -> int:
    """The address of an array that lives as long as ``kept``."""
    kept.append(array)
    return array.ctypes.data


def _own_range(segment: Segment, cache: KVCache, kept: list[Any]) -> tuple[int, int, int]:
    """Where what this rank computes of a segment begins and ends, and the address of all ranks'
    borders, if they share it."""
    ranks = cache.context_ranks
    if segment.num_drafts or not is_shared(segment.num_tokens, ranks):
        return segment.start, segment.stop, 0
    cuts = context_cuts(segment.start, segment.stop, ranks, cache.block_tokens)
    start, stop = cuts[cache.rank : cache.rank + 2]
    return start, stop, _keep(np.array(cuts, dtype=np.int32), kept)


def _states(
    segment: Segment, state: CPUSequence, role: ModelRole, cache: KVCache, kept: list[Any]
) -> tuple[int, int]:
    """The addresses of a sequence's state, and of where it is to be saved."""
    assert not segment.parents, "a state takes in one token after the other"
    (block,) = state.table(role, len(cache.groups))
    saves = [(save.position, cache.state_address(save.block)) for save in segment.state_saves]
    return cache.state_address(block), _keep(np.array(saves, dtype=STATE_SAVE), kept)


def _ancestor_bits(segment: Segment) -> npt.NDArray[np.uint64]:
    """For each token, which drafts it sees; see `rl_sequence`."""
    assert segment.num_drafts <= 64, "a tree has at most 64 drafts"
    bits = np.zeros(segment.num_tokens, dtype=np.uint64)
    for node in range(segment.num_drafts):
        path = sum(1 << each for each in ancestors(segment.parents, node))
        bits[segment.num_tokens - segment.num_drafts + node] = path
    return bits
