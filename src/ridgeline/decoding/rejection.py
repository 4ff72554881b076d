"""Rejection sampling: the classical verification of drafts (Leviathan et al., Chen et al. 2023).

A draft x, drawn from q, is accepted with probability min(1, p(x) / q(x)); if it is rejected, the
token is drawn from the distribution proportional to max(p − q, 0). The token is then distributed as
p, and no rule accepts more drafts. Unlike the rule of `verification`, it is not the token that a
run without drafts would draw.

Drafts, verdicts, redrawn tokens and those after a whole draft have streams of noise of their own,
so what a draft was drawn with tells nothing of what is drawn in its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ridgeline.core.philox import NoiseStream
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.decoding.noise import random_words, uniform
from ridgeline.decoding.sampling import History, NothingToSampleError, draw, process_logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A drafted token, and the distribution ``[V]`` that it was drawn from."""

    token_id: int
    q_V: torch.Tensor


def accepts(
    p_NV: torch.Tensor, q_NV: torch.Tensor, drafts_N: torch.Tensor, uniform_N: torch.Tensor
) -> torch.Tensor:
    """Which drafts are accepted.

    ``p_NV`` and ``q_NV`` are the target's and the drafter's probabilities as they are sampled
    (after penalties, temperature, truncation and mask); a drafter without a distribution has a one
    at its draft. ``uniform_N`` in (0, 1) is independent of what the drafts were drawn with.
    """
    rows = torch.arange(len(drafts_N))
    return uniform_N * q_NV[rows, drafts_N] < p_NV[rows, drafts_N]


def residual(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    """What a token is drawn from, in proportion, where a draft from q was rejected."""
    rest = (p_NV - q_NV).clamp_min(0.0)
    # Where p equals q there is no rest, and nothing is rejected but by rounding.
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p_NV)


def propose(
    logits_V: torch.Tensor,
    params: SamplingParams,
    history: History,
    *,
    seed: int,
    sample_index: int,
) -> Proposal:
    """Draw a draft for position ``len(history.token_ids)`` from a draft model's logits.

    Raises:
        NothingToSampleError: no token is possible.
    """
    processed = _possible(process_logits(logits_V, params, history))
    token = draw(
        processed,
        seed=seed,
        sample_index=sample_index,
        position=len(history.token_ids),
        stream=NoiseStream.DRAFT,
    )
    return Proposal(token_id=token, q_V=processed.softmax(-1))


def verify_by_rejection(
    drafts: Sequence[int],
    proposals: Sequence[Proposal | None],
    target: Callable[[int], torch.Tensor],
    *,
    seed: int,
    sample_index: int,
    position: int,
    masks_NV: torch.Tensor | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens from ``position`` on, accepted drafts and then one more; and the accepted indices.

    ``target(i)`` are the target's processed logits ``[V]`` after i drafts. Drafts without a
    proposal were looked up. ``masks_NV``: drafts that these forbid were never proposed, so they
    have no probability under q either.

    Raises:
        NothingToSampleError: no token is possible.
    """
    for index, (token, proposal) in enumerate(zip(drafts, proposals, strict=True)):
        p_V = _possible(target(index)).softmax(-1)
        q_V = _proposed(token, proposal, p_V, None if masks_NV is None else masks_NV[index])
        drafted = torch.tensor([token])
        words = random_words(
            drafted,
            seed=seed,
            sample_index=sample_index,
            position=position + index,
            stream=NoiseStream.ACCEPT,
        )
        if bool(accepts(p_V[None], q_V[None], drafted, uniform(words))[0]):
            continue
        redrawn = draw(
            residual(p_V[None], q_V[None])[0].log(),
            seed=seed,
            sample_index=sample_index,
            position=position + index,
            stream=NoiseStream.RESIDUAL,
        )
        return (*drafts[:index], redrawn), tuple(range(index))
    count = len(drafts)
    last = draw(
        _possible(target(count)), seed=seed, sample_index=sample_index, position=position + count
    )
    return (*drafts, last), tuple(range(count))


def _proposed(
    token: int, proposal: Proposal | None, like_V: torch.Tensor, mask_V: torch.Tensor | None
) -> torch.Tensor:
    """The distribution that a draft came from."""
    if proposal is None:
        return torch.zeros_like(like_V).index_fill(0, torch.tensor([token]), 1.0)
    q_V = proposal.q_V
    if mask_V is not None:
        q_V = q_V * mask_V
    return q_V / q_V.sum()


def _possible(processed_V: torch.Tensor) -> torch.Tensor:
    """The row, unless nothing can be drawn from it."""
    if not processed_V.max() > float("-inf"):  # −inf, or NaN
        raise NothingToSampleError
    return processed_V
