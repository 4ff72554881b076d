"""From logits to a token: a chain of pure functions over one row of logits.

Order: mask → bias → minimum length → penalties → temperature → top-k → top-p → min-p → draw (that
of transformers). The draw is the Gumbel-max trick with counter-based noise: argmax(logits + g) is
distributed as softmax(logits), and g depends on (seed, sample index, position, token id) alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ridgeline.core.philox import NoiseStream
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.decoding.noise import gumbel, random_words

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
    logits_V: torch.Tensor,
    params: SamplingParams,
    history: History,
    *,
    seed: int,
    sample_index: int = 0,
    mask_V: torch.Tensor | None = None,
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
    processed_V: torch.Tensor,
    *,
    seed: int,
    sample_index: int,
    position: int,
    stream: NoiseStream = NoiseStream.SAMPLE,
) -> int:
    """Draw from softmax(``processed_V``), of which at least one entry is finite."""
    candidates = torch.nonzero(processed_V > _NEVER)[:, 0]
    words = random_words(
        candidates, seed=seed, sample_index=sample_index, position=position, stream=stream
    )
    return int(candidates[(processed_V[candidates] + gumbel(words)).argmax()])


def process_logits(
    logits_V: torch.Tensor,
    params: SamplingParams,
    history: History,
    *,
    mask_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits of the distribution that is sampled, float64; −inf for what cannot be drawn."""
    logits = constrain(logits_V, params, history, mask_V=mask_V)
    if params.is_greedy:
        return logits
    logits = (logits - logits.max()) / params.temperature  # no overflow, however cold
    logits = _top_k(logits, params.top_k)
    logits = _top_p(logits, params.top_p)
    return _min_p(logits, params.min_p)


def constrain(
    logits_V: torch.Tensor,
    params: SamplingParams,
    history: History,
    *,
    mask_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """The part of `process_logits` that looks at single tokens: mask, bias, length, penalties."""
    logits = logits_V.double()
    if mask_V is not None:
        logits = logits.masked_fill(~mask_V, _NEVER)
    logits = _bias(logits, params)
    logits = _minimum_length(logits, params, history)
    return _penalise(logits, params, history) if params.has_penalties else logits


def _bias(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if not params.logit_bias:
        return logits
    ids = torch.tensor(list(params.logit_bias), device=logits.device)
    return logits.index_add(0, ids, logits.new_tensor(list(params.logit_bias.values())))


def _minimum_length(logits: torch.Tensor, params: SamplingParams, history: History) -> torch.Tensor:
    barred = (*history.eos_token_ids, *params.stop_token_ids)
    if len(history.output) >= params.min_tokens or not barred:
        return logits
    without = logits.index_fill(0, torch.tensor(barred, device=logits.device), _NEVER)
    return without if without.max() > _NEVER else logits  # where only an end is possible, it ends


def _penalise(logits_V: torch.Tensor, params: SamplingParams, history: History) -> torch.Tensor:
    def ids(tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.long, device=logits_V.device)

    seen = ids(sorted(set(history.token_ids)))
    factor = params.repetition_penalty
    kept = logits_V[seen]
    logits = logits_V.index_copy(0, seen, torch.where(kept > 0, kept / factor, kept * factor))
    counts = torch.bincount(ids(list(history.output)), minlength=len(logits))
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def _top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep the k best; ties with the k-th are kept, so that the order of ids does not matter."""
    if k <= 0 or k >= len(logits):
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[-1], _NEVER)


def _top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the smallest set of best tokens whose probabilities reach p (Holtzman et al. 2020)."""
    if p >= 1.0:
        return logits
    order = logits.sort(descending=True, stable=True)
    probabilities = order.values.softmax(-1)
    dropped = probabilities.cumsum(-1) - probabilities >= p
    return logits.index_fill(0, order.indices[dropped], _NEVER)


def _min_p(logits: torch.Tensor, share: float) -> torch.Tensor:
    """Drop tokens below ``share`` of the best one's probability (Nguyen et al. 2024)."""
    if share == 0.0:
        return logits
    log_share = torch.tensor(share, dtype=logits.dtype).log()
    return logits.masked_fill(logits < logits.max() + log_share, _NEVER)
