"""From hidden states to a segment's result: sampling, verification, log-probabilities."""

import contextlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.core.result import SegmentResult, TokenLogprobs
from ridgeline.decoding import NothingToSampleError, ancestors, sample, token_logprobs, verify
from ridgeline.executors.reference.batch import SegmentInput

Mask = npt.NDArray[np.uint32]


def segment_result(
    item: SegmentInput,
    hidden_SD: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    mask: Mask | None,
) -> SegmentResult:
    """Everything that the segment's `Outputs` ask for. ``head`` maps hidden rows to logits."""
    wanted = item.segment.outputs
    num_sampled = 1 + item.segment.num_drafts if wanted.sample else 0
    num_rows = item.segment.num_tokens if wanted.every_position else num_sampled
    logits = head(hidden_SD[len(hidden_SD) - num_rows :]) if num_rows else hidden_SD[:0]
    tokens: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    if wanted.sample:
        with contextlib.suppress(NothingToSampleError):
            tokens, accepted, logprobs = _draw(item, logits[num_rows - num_sampled :], mask)
    return SegmentResult(
        token_ids=tokens,
        accepted=accepted,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(item, logits) if wanted.prompt_logprobs else (),
        logits=logits.float().numpy().copy() if wanted.logits else None,
        pooled=hidden_SD[-1].float().numpy().copy() if wanted.pooled else None,
    )


def _draw(
    item: SegmentInput, logits_NV: torch.Tensor, mask: Mask | None
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[TokenLogprobs, ...]]:
    """Tokens, accepted drafts and log-probabilities; row 0 is the last known token, 1.. drafts."""
    state, admission = item.state, item.state.admission
    known = item.known[: item.segment.stop - item.segment.num_drafts]
    allowed = None if mask is None else _unpack(mask, logits_NV.shape[1])

    def draw(node: int) -> int:
        path = [item.drafts[i] for i in ancestors(item.parents, node)]
        return sample(
            logits_NV[node + 1],
            admission.params,
            state.history([*known, *path]),
            seed=admission.seed,
            sample_index=admission.sample_index,
            mask_V=None if allowed is None else allowed[node + 1],
        )

    tokens, accepted = verify(item.drafts, item.parents, draw)
    num_top = admission.params.logprobs
    if num_top is None:
        return tokens, accepted, ()
    rows = (0, *(node + 1 for node in accepted))
    logprobs = (
        token_logprobs(logits_NV[row], token, num_top)
        for row, token in zip(rows, tokens, strict=True)
    )
    return tokens, accepted, tuple(logprobs)


def _prompt_logprobs(item: SegmentInput, logits_SV: torch.Tensor) -> tuple[TokenLogprobs, ...]:
    num_top = item.state.admission.params.prompt_logprobs or 0
    start, stop = item.segment.start, item.segment.stop
    following = item.known[start + 1 : stop + 1]
    return tuple(
        token_logprobs(row, token, num_top)
        for row, token in zip(logits_SV, following, strict=False)
    )


def _unpack(mask: Mask, vocab_size: int) -> torch.Tensor:
    """uint32 bit rows to bool ``[rows, V]``."""
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(bits[:, :vocab_size].astype(bool))
