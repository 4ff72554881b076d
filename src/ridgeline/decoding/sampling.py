"""From logits to a token: a chain of pure functions over one row of logits.

Order: mask → bias → minimum length → penalties → temperature → top-k → top-p → min-p → draw (that
of transformers). The draw is the Gumbel-max trick with counter-based noise: argmax(logits + g) is
distributed as softmax(logits), and g depends on (seed, sample index, position, token id) alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.philox import NoiseStream, words_of
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.decoding.noise import gumbel

_NEVER = float("-inf")


class NothingToSampleError(Exception):
    """No token is possible for one sequence; the others of the step are not concerned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The tokens before the one that is drawn, whose position is ``len(token_ids)``."""

    token_ids: Sequence[int]
    num_prompt_tokens: int
    eos_token_ids: Sequence[int] = ()

    @property
    def output(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt_tokens :]


def sample(
    logits_V: Array,
    params: SamplingParams,
    history: History,
    *,
    seed: int,
    sample_index: int = 0,
    mask_V: Array | None = None,
) -> int:
    """Draw the token at position ``len(history.token_ids)``. ``mask_V``: bool, the allowed ones.

    Raises:
        NothingToSampleError: no token is possible: an empty mask, or logits that are NaN.
    """
    processed = process_logits(logits_V, params, history, mask_V=mask_V)
    if not processed.max() > _NEVER:  # −inf, or NaN
        raise NothingToSampleError
    if params.is_greedy:
        return int(processed.argmax())
    return draw(processed, seed=seed, sample_index=sample_index, position=len(history.token_ids))


def draw(
    processed_V: Array,
    *,
    seed: int,
    sample_index: int,
    position: int,
    stream: NoiseStream = NoiseStream.SAMPLE,
) -> int:
    """Draw from softmax(``processed_V``), of which at least one entry is finite."""
    candidates = np.flatnonzero(processed_V > _NEVER)
    words = words_of(
        candidates, seed=seed, sample_index=sample_index, position=position, stream=stream
    )
    return int(candidates[(processed_V[candidates] + gumbel(words)).argmax()])


def process_logits(
    logits_V: Array,
    params: SamplingParams,
    history: History,
    *,
    mask_V: Array | None = None,
) -> Array:
    """Logits of the distribution that is sampled, float64; −inf for what cannot be drawn."""
    logits = constrain(logits_V, params, history, mask_V=mask_V)
    if params.is_greedy:
        return logits
    with np.errstate(invalid="ignore", over="ignore"):
        logits = (logits - logits.max()) / params.temperature  # no overflow, however cold
    logits = _top_k(logits, params.top_k)
    logits = _top_p(logits, params.top_p)
    return _min_p(logits, params.min_p)


def constrain(
    logits_V: Array,
    params: SamplingParams,
    history: History,
    *,
    mask_V: Array | None = None,
) -> Array:
    """The part of `process_logits` that looks at single tokens: mask, bias, length, penalties."""
    logits = logits_V.astype(np.float64)
    if mask_V is not None:
        logits[~mask_V] = _NEVER
    logits = _bias(logits, params)
    logits = _minimum_length(logits, params, history)
    return _penalise(logits, params, history) if params.has_penalties else logits


def _bias(logits: Array, params: SamplingParams) -> Array:
    if not params.logit_bias:
        return logits
    logits = logits.copy()
    logits[list(params.logit_bias)] += list(params.logit_bias.values())
    return logits


def _minimum_length(logits: Array, params: SamplingParams, history: History) -> Array:
    barred = (*history.eos_token_ids, *params.stop_token_ids)
    if len(history.output) >= params.min_tokens or not barred:
        return logits
    without = _without(logits, list(barred))
    return without if without.max() > _NEVER else logits  # where only an end is possible, it ends


def _penalise(logits_V: Array, params: SamplingParams, history: History) -> Array:
    seen = np.array(sorted(set(history.token_ids)), dtype=np.int64)
    factor = params.repetition_penalty
    logits, kept = logits_V.copy(), logits_V[seen]
    logits[seen] = np.where(kept > 0, kept / factor, kept * factor)
    output = np.array(history.output, dtype=np.int64)
    counts = np.bincount(output, minlength=len(logits)).astype(np.float32)
    frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
    logits -= frequency * counts
    logits -= presence * (counts > 0)
    return logits


def _top_k(logits: Array, k: int) -> Array:
    """Keep the k best; ties with the k-th are kept, so that the order of ids does not matter."""
    if k <= 0 or k >= len(logits):
        return logits
    return _without(logits, logits < np.partition(logits, len(logits) - k)[len(logits) - k])


def _top_p(logits: Array, p: float) -> Array:
    """Keep the smallest set of best tokens whose probabilities reach p (Holtzman et al. 2020)."""
    if p >= 1.0:
        return logits
    order = np.argsort(-logits, kind="stable")
    probabilities = softmax(logits[order])
    dropped = probabilities.cumsum() - probabilities >= p
    return _without(logits, order[dropped])


def _min_p(logits: Array, share: float) -> Array:
    """Drop tokens below ``share`` of the best one's probability (Nguyen et al. 2024)."""
    if share == 0.0:
        return logits
    return _without(logits, logits < logits.max() + np.log(share))


def softmax(logits_V: Array) -> Array:
    """The probabilities of a row of which at least one entry is finite."""
    weights = np.exp(logits_V - logits_V.max())
    probabilities: Array = weights / weights.sum()
    return probabilities


def _without(logits: Array, dropped: Array | list[int]) -> Array:
    """A copy in which some tokens cannot be drawn."""
    logits = logits.copy()
    logits[dropped] = _NEVER
    return logits
