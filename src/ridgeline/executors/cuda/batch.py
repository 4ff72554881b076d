"""A pass's segments as the arrays that go to the device.

Segments of few tokens come first, since their attention is another kernel's; results are told
apart by ``order``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.core.plan import ModelRole, Segment, is_reference
from ridgeline.decoding import ancestors, depths
from ridgeline.executors.cuda.inputs import Short, Span
from ridgeline.executors.outputs import num_logit_rows
from ridgeline.executors.state import SequenceState
from ridgeline.kernels.triton import MAX_TREE_DRAFTS

MAX_SHORT = 16  # tokens

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """Inputs of one pass; T tokens, S segments.

    Attributes:
        order: the segments' numbers in the pass, as they lie here.
        sources: int64 ``[T]``, tokens, or what the caller made of references.
        positions, slots: int64 ``[T]``.
        kv_positions: int64 ``[T]``, where KV is kept; drafts of a tree lie one behind the other.
        query_starts: int32 ``[S + 1]``; stops: int32 ``[S]``; segment_slots: int64 ``[S]``.
        logit_rows: int64, rows of the pass that the LM head runs on, segment by segment.
        rope_lengths: of the sequence that each token sees, for rotary schemes that ask.
        tree: numbers of drafts int32 ``[S]``, ancestors int64 ``[T]``; ``None`` without trees.
    """

    order: tuple[int, ...]
    spans: tuple[Span, ...]
    short: Short
    sources: Ints
    positions: Ints
    kv_positions: Ints
    slots: Ints
    query_starts: npt.NDArray[np.int32]
    stops: npt.NDArray[np.int32]
    segment_slots: Ints
    logit_rows: Ints
    rope_lengths: tuple[int, ...] | None
    tree: tuple[npt.NDArray[np.int32], Ints] | None

    @property
    def num_tokens(self) -> int:
        return len(self.sources)


def build_batch(
    segments: Sequence[Segment],
    states: Mapping[int, SequenceState],
    source: Callable[[int], int],
    *,
    with_lengths: bool,
) -> HostBatch:
    """The arrays; ``source`` is what stands for a token or a reference to one."""
    order = sorted(range(len(segments)), key=lambda i: _class(segments[i]))
    sources: list[int] = []
    positions: list[int] = []
    kv_positions: list[int] = []
    slots: list[int] = []
    lengths: list[int] = []
    logit_rows: list[int] = []
    spans: list[Span] = []
    for number in order:
        segment = segments[number]
        state = states[segment.slot]
        first, last = len(sources), len(sources) + segment.num_tokens
        sources.extend(map(source, segment.token_ids))
        own = _positions(segment)
        positions.extend(own)
        kv_positions.extend(range(segment.start, segment.stop))
        slots.extend([segment.slot] * segment.num_tokens)
        if with_lengths:
            lengths.extend(map(state.rope_length, own))
        logit_rows.extend(range(last - num_logit_rows(segment), last))
        spans.append(
            Span(
                first=first,
                last=last,
                start=segment.start,
                stop=segment.stop,
                parents=segment.parents,
                adapter=state.admission.adapter,
            )
        )
    return HostBatch(
        order=tuple(order),
        spans=tuple(spans),
        short=_short(spans),
        sources=np.array(sources, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        kv_positions=np.array(kv_positions, dtype=np.int64),
        slots=np.array(slots, dtype=np.int64),
        query_starts=np.array([0, *(span.last for span in spans)], dtype=np.int32),
        stops=np.array([span.stop for span in spans], dtype=np.int32),
        segment_slots=np.array([segments[i].slot for i in order], dtype=np.int64),
        logit_rows=np.array(logit_rows, dtype=np.int64),
        rope_lengths=tuple(lengths) if with_lengths else None,
        tree=_tree(spans) if any(span.parents for span in spans) else None,
    )


def void_batch(num_tokens: int, slot: int) -> HostBatch:
    """A prompt of no sequence, in the slot of padding: it writes where nobody reads."""
    positions = np.arange(num_tokens, dtype=np.int64)
    return HostBatch(
        order=(0,),
        spans=(Span(first=0, last=num_tokens, start=0, stop=num_tokens),),
        short=Short(0, 0, 0),
        sources=np.full(num_tokens, -1, dtype=np.int64),
        positions=positions,
        kv_positions=positions,
        slots=np.full(num_tokens, slot, dtype=np.int64),
        query_starts=np.array([0, num_tokens], dtype=np.int32),
        stops=np.array([num_tokens], dtype=np.int32),
        segment_slots=np.array([slot], dtype=np.int64),
        logit_rows=np.array([num_tokens - 1], dtype=np.int64),
        rope_lengths=(num_tokens,) * num_tokens,
        tree=None,
    )


def note_known(
    segments: Sequence[Segment], states: Mapping[int, SequenceState], role: ModelRole
) -> None:
    """Record the tokens that a pass brings; those that it refers to are recorded by their step."""
    for segment in segments:
        tokens = segment.token_ids[: segment.num_tokens - segment.num_drafts]
        while tokens and is_reference(tokens[-1]):
            tokens = tokens[:-1]
        if tokens:
            states[segment.slot].set_tokens(role, segment.start, tokens)


def _class(segment: Segment) -> bool:
    return segment.num_tokens > MAX_SHORT


def _short(spans: Sequence[Span]) -> Short:
    lengths = [span.last - span.first for span in spans if span.last - span.first <= MAX_SHORT]
    return Short(len(lengths), sum(lengths), max(lengths, default=0))


def _positions(segment: Segment) -> Sequence[int]:
    if not segment.parents:
        return range(segment.start, segment.stop)
    first_draft = segment.stop - segment.num_drafts
    drafted = (first_draft + depth - 1 for depth in depths(segment.parents))
    return [*range(segment.start, first_draft), *drafted]


def _tree(spans: Sequence[Span]) -> tuple[npt.NDArray[np.int32], Ints]:
    """Drafts of each segment with a tree, and which of them each token sees, as bits."""
    counts = np.array([len(span.parents) for span in spans], dtype=np.int32)
    assert counts.max() <= MAX_TREE_DRAFTS, "a tree has more drafts than a mask has bits"
    bits = np.zeros(spans[-1].last, dtype=np.uint64)
    for span in spans:
        first = span.last - len(span.parents)
        for node in range(len(span.parents)):
            bits[first + node] = sum(1 << each for each in ancestors(span.parents, node))
    return counts, bits.view(np.int64)
