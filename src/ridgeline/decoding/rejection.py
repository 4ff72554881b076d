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

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.philox import NoiseStream, words_of
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.decoding.noise import uniform
from ridgeline.decoding.sampling import History, NothingToSampleError, draw, process_logits, softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A drafted token, and the distribution ``[V]`` that it was drawn from."""

    token_id: int
    q_V: Array


def accepts(p_NV: Array, q_NV: Array, drafts_N: Array, uniform_N: Array) -> Array:
    """Which drafts are accepted.

    ``p_NV`` and ``q_NV`` are the target's and the drafter's probabilities as they are sampled
    (after penalties, temperature, truncation and mask); a drafter without a distribution has a one
    at its draft. ``uniform_N`` in (0, 1) is independent of what the drafts were drawn with.
    """
    rows = np.arange(len(drafts_N))
    accepted: Array = uniform_N * q_NV[rows, drafts_N] < p_NV[rows, drafts_N]
    return accepted


def residual(p_NV: Array, q_NV: Array) -> Array:
    """What a token is drawn from, in proportion, where a draft from q was rejected."""
    rest = np.maximum(p_NV - q_NV, 0.0)
    # Where p equals q there is no rest, and nothing is rejected but by rounding.
    return np.where(rest.sum(-1, keepdims=True) > 0, rest, p_NV)


def propose(
    logits_V: Array,
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
    return Proposal(token_id=token, q_V=softmax(processed))


def verify_by_rejection(
    drafts: Sequence[int],
    proposals: Sequence[Proposal | None],
    target: Callable[[int], Array],
    *,
    seed: int,
    sample_index: int,
    position: int,
    masks_NV: Array | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens from ``position`` on, accepted drafts and then one more; and the accepted indices.

    ``target(i)`` are the target's processed logits ``[V]`` after i drafts. Drafts without a
    proposal were looked up. ``masks_NV``: drafts that these forbid were never proposed, so they
    have no probability under q either.

    Raises:
        NothingToSampleError: no token is possible.
    """
    for index, (token, proposal) in enumerate(zip(drafts, proposals, strict=True)):
        p_V = softmax(_possible(target(index)))
        q_V = _proposed(token, proposal, p_V, None if masks_NV is None else masks_NV[index])
        drafted = np.array([token])
        words = words_of(
            drafted,
            seed=seed,
            sample_index=sample_index,
            position=position + index,
            stream=NoiseStream.ACCEPT,
        )
        if bool(accepts(p_V[None], q_V[None], drafted, uniform(words))[0]):
            continue
        with np.errstate(divide="ignore"):
            rest_V = np.log(residual(p_V[None], q_V[None])[0])
        redrawn = draw(
            rest_V,
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


def _proposed(token: int, proposal: Proposal | None, like_V: Array, mask_V: Array | None) -> Array:
    """The distribution that a draft came from."""
    if proposal is None:
        q_V = np.zeros_like(like_V)
        q_V[token] = 1.0
        return q_V
    q_V = proposal.q_V
    if mask_V is not None:
        q_V = q_V * mask_V
    rest: Array = q_V / q_V.sum()
    return rest


def _possible(processed_V: Array) -> Array:
    """The row, unless nothing can be drawn from it."""
    if not processed_V.max() > float("-inf"):  # −inf, or NaN
        raise NothingToSampleError
    return processed_V
