"""From hidden states to a segment's result: sampling, verification, log-probabilities."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ridgeline.core.arrays import Array
from ridgeline.core.errors import EngineError
from ridgeline.core.plan import ModelRole, Outputs, Segment
from ridgeline.core.pooling import Pooling
from ridgeline.core.result import SegmentResult, TokenLogprobs
from ridgeline.decoding import (
    NothingToSampleError,
    ancestors,
    chain,
    depths,
    process_logits,
    propose,
    sample,
    token_logprobs,
    verify,
    verify_by_rejection,
)
from ridgeline.executors.handle import Mask
from ridgeline.executors.state import SequenceState

_NOTHING = Outputs()
_DRAWN = (Outputs(sample=True), Outputs(sample=True, masked=True))


@dataclass(frozen=True, kw_only=True)
class SegmentContext:
    """One segment, its references resolved, with the tokens ``known`` of its sequence."""

    segment: Segment
    state: SequenceState
    known: Sequence[int]

    @property
    def parents(self) -> tuple[int, ...]:
        return self.segment.parents or chain(self.segment.num_drafts)

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.segment.token_ids[self.segment.num_tokens - self.segment.num_drafts :]

    @property
    def wants_drawn_only(self) -> bool:
        """Whether one token is wanted, and nothing that is computed from logits beside it."""
        return (
            self.segment.outputs in _DRAWN
            and not self.segment.num_drafts
            and self.state.admission.params.logprobs is None
        )

    def path(self, node: int) -> list[int]:
        """The drafts from the last known token to draft ``node``; none for −1."""
        return [self.drafts[each] for each in ancestors(self.parents, node)]

    def tokens_before(self, node: int) -> list[int]:
        """All tokens before the one that follows draft ``node`` (−1: the last known token)."""
        return [*self.known[: self.segment.stop - self.segment.num_drafts], *self.path(node)]


def num_logit_rows(segment: Segment) -> int:
    """How many of a segment's last rows the LM head runs on."""
    if segment.outputs.every_position:
        return segment.num_tokens
    return num_sampled_rows(segment)


def num_sampled_rows(segment: Segment) -> int:
    """On how many of them a token is drawn: after the last known token, and after each draft."""
    return 1 + segment.num_drafts if segment.outputs.sample else 0


class DrawnRow(NamedTuple):
    """A row of logits from which the token at ``position`` is drawn.

    It follows draft ``node`` of segment ``number`` of the pass (−1: its last known token).
    """

    number: int
    node: int
    logit_row: int
    position: int


def draw_tokens(
    items: Sequence[SegmentContext],
    role: ModelRole,
    masks: Sequence[Mask | None],
    num_rows: Callable[[Segment], int],
    draw: Callable[[Sequence[DrawnRow], Sequence[Mask | None]], list[int]],
) -> list[list[int] | None]:
    """For each segment the tokens of its sampled rows, −1 where none is possible.

    ``draw`` draws from all rows at once, each with its words of a mask; ``num_rows`` says how many
    rows of logits a segment has. ``None`` is for segments of which no token is wanted, or whose
    drafts are drawn or verified by rejection.
    """
    rows: list[DrawnRow] = []
    spans: list[range | None] = []
    end = 0
    for number, item in enumerate(items):
        segment = item.segment
        end += num_rows(segment)
        drafts = segment.num_drafts > 0 or role is ModelRole.DRAFT
        if not segment.outputs.sample or (drafts and item.state.verifies_by_rejection):
            spans.append(None)
            continue
        first, position = end - num_sampled_rows(segment), segment.stop - segment.num_drafts
        start = len(rows)
        for index, depth in enumerate((0, *depths(item.parents))):
            rows.append(DrawnRow(number, index - 1, first + index, position + depth))
        spans.append(range(start, len(rows)))
    if not rows:
        return [None] * len(spans)
    words = [None if (mask := masks[row.number]) is None else mask[row.node + 1] for row in rows]
    tokens = draw(rows, words)
    return [None if span is None else tokens[span.start : span.stop] for span in spans]


class SegmentRows(NamedTuple):
    """What a pass computed for a segment.

    ``logits_NV`` are those of its last `num_logit_rows` rows, or only of those that are sampled
    where ``prompt_logits`` gives every row's for prompt log-probabilities. ``hidden`` gives the
    final hidden states of its rows, or of the last one alone where no other is wanted.
    """

    logits_NV: Array
    hidden: Callable[[], Array]
    prompt_logits: Iterable[Array] | None = None


def segment_result(
    item: SegmentContext,
    rows_of: Callable[[], SegmentRows],
    mask: Mask | None,
    *,
    role: ModelRole = ModelRole.TARGET,
    drawn: Sequence[int] | None = None,
) -> SegmentResult:
    """Everything that the segment's `Outputs` ask for.

    ``drawn`` are the tokens of the rows that are sampled, where they have been drawn already; −1
    stands for none. ``rows_of`` is called if anything is wanted. Proposals that are to be verified
    by rejection enter the sequence's state, and leave it as they are verified.
    """
    wanted = item.segment.outputs
    if wanted == _NOTHING:
        return SegmentResult()
    logits_NV, hidden, prompt_logits = rows_of()
    tokens: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    candidates: tuple[TokenLogprobs, ...] = ()
    if wanted.sample:
        rows = logits_NV[len(logits_NV) - num_sampled_rows(item.segment) :]
        if wanted.drawn and drawn is None:
            drawn = _draw_everywhere(item, rows, mask)
        with contextlib.suppress(NothingToSampleError):
            tokens, accepted = _draw(item, rows, mask, role, drawn)
            num_top = item.state.admission.params.logprobs
            if num_top is not None:  # the request wants them
                logprobs = _logprobs(rows, tokens, accepted, num_top)
            if wanted.candidates:
                candidates = _logprobs(rows, tokens, accepted, wanted.candidates)
    return SegmentResult(
        token_ids=tokens,
        accepted=accepted,
        logprobs=logprobs,
        prompt_logprobs=(
            _prompt_logprobs(item, logits_NV if prompt_logits is None else prompt_logits)
            if wanted.prompt_logprobs
            else ()
        ),
        logits=logits_NV.astype(np.float32) if wanted.logits else None,
        pooled=None if wanted.pooled is None else pool_hidden(hidden(), wanted.pooled),
        candidates=candidates,
        drawn=tuple(drawn or ()) if wanted.drawn else (),
    )


def pool_hidden(hidden_SD: Array, pooling: Pooling) -> npt.NDArray[np.float32]:
    """One vector ``[D]`` of the hidden states of a sequence."""
    pooled: Array
    match pooling:
        case Pooling.CLS:
            pooled = hidden_SD[0]
        case Pooling.LAST:
            pooled = hidden_SD[-1]
        case Pooling.MEAN:
            pooled = hidden_SD.mean(axis=0)
        case Pooling.MAX:
            pooled = hidden_SD.max(axis=0)
        case Pooling.MEAN_SQRT_LEN:
            pooled = hidden_SD.sum(axis=0) / len(hidden_SD) ** 0.5
    return np.array(pooled, dtype=np.float32)  # the rows are overwritten by the next pass


def _draw_everywhere(item: SegmentContext, logits_NV: Array, mask: Mask | None) -> list[int]:
    """The tokens after the last known one and each draft; −1 where none is possible."""
    allowed = None if mask is None else _unpack(mask, logits_NV.shape[1])
    tokens = []
    for node in range(-1, len(item.drafts)):
        token = -1
        with contextlib.suppress(NothingToSampleError):
            token = _sample_after(item, logits_NV, allowed, node)
        tokens.append(token)
    return tokens


def _sample_after(
    item: SegmentContext, logits_NV: Array, allowed_NV: Array | None, node: int
) -> int:
    """The token after draft ``node``, −1: after the last known token."""
    admission = item.state.admission
    return sample(
        logits_NV[node + 1],
        admission.params,
        item.state.history(item.tokens_before(node)),
        seed=admission.seed,
        sample_index=admission.sample_index,
        mask_V=None if allowed_NV is None else allowed_NV[node + 1],
    )


def _draw(
    item: SegmentContext,
    logits_NV: Array,
    mask: Mask | None,
    role: ModelRole,
    drawn: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and accepted drafts; row 0 is the last known token, 1.. drafts."""
    state = item.state
    known = item.known[: item.segment.stop - item.segment.num_drafts]
    if state.verifies_by_rejection and role is ModelRole.DRAFT:
        return (_propose(item, logits_NV[0], known),), ()
    allowed = None if mask is None else _unpack(mask, logits_NV.shape[1])

    def draw(node: int) -> int:
        if drawn is None:
            return _sample_after(item, logits_NV, allowed, node)
        if drawn[node + 1] < 0:
            raise NothingToSampleError
        return drawn[node + 1]

    if state.verifies_by_rejection and item.drafts:
        return _verify_by_rejection(item, logits_NV, known, allowed)
    return verify(item.drafts, item.parents, draw)


def _propose(item: SegmentContext, logits_V: Array, known: Sequence[int]) -> int:
    state, admission = item.state, item.state.admission
    try:
        proposal = propose(
            logits_V,
            admission.params,
            state.history(known),
            seed=admission.seed,
            sample_index=admission.sample_index,
        )
    except NothingToSampleError:
        state.proposals.clear()  # the whole chain is dropped
        raise
    state.proposals[len(known)] = proposal
    return proposal.token_id


def _verify_by_rejection(
    item: SegmentContext,
    logits_NV: Array,
    known: Sequence[int],
    allowed_NV: Array | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if item.segment.parents:
        raise EngineError("Rejection sampling verifies chains of drafts, not trees.")
    state, admission = item.state, item.state.admission

    def target(count: int) -> Array:
        return process_logits(
            logits_NV[count],
            admission.params,
            state.history([*known, *item.drafts[:count]]),
            mask_V=None if allowed_NV is None else allowed_NV[count],
        )

    return verify_by_rejection(
        item.drafts,
        [state.proposals.get(len(known) + index) for index in range(len(item.drafts))],
        target,
        seed=admission.seed,
        sample_index=admission.sample_index,
        position=len(known),
        masks_NV=allowed_NV,
    )


def _logprobs(
    logits_NV: Array, tokens: Sequence[int], accepted: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """One for each token."""
    rows = (0, *(node + 1 for node in accepted))
    return tuple(
        token_logprobs(logits_NV[row], token, num_top)
        for row, token in zip(rows, tokens, strict=True)
    )


def _prompt_logprobs(item: SegmentContext, logits_SV: Iterable[Array]) -> tuple[TokenLogprobs, ...]:
    num_top = item.state.admission.params.prompt_logprobs or 0
    start, stop = item.segment.start, item.segment.stop
    following = item.known[start + 1 : stop + 1]
    return tuple(
        token_logprobs(row, token, num_top)
        for token, row in zip(following, logits_SV, strict=False)
    )


def _unpack(mask: Mask, vocab_size: int) -> Array:
    """uint32 bit rows to bool ``[rows, V]``."""
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    return bits[:, :vocab_size].astype(bool)
