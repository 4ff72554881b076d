"""Log-probabilities of chosen tokens and of their alternatives."""

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.result import TokenLogprobs


def token_logprobs(logits_V: Array, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability and rank of ``token_id`` under raw logits, with the ``num_top`` best."""
    logits = logits_V.astype(np.float64)
    logits -= logits.max()
    logprobs = logits - np.log(np.exp(logits).sum())
    best = _best(logprobs, min(num_top, len(logprobs)))
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logprobs[token_id]),
        rank=int((logprobs > logprobs[token_id]).sum()) + 1,
        top=tuple(zip(best.tolist(), logprobs[best].tolist(), strict=True)),
    )


def _best(values: Array, count: int) -> Array:
    """The indices of the largest values, the largest first, of equal ones the lowest index."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    least = np.partition(values, len(values) - count)[len(values) - count]
    found = np.flatnonzero(values >= least)
    return found[np.argsort(-values[found], kind="stable")][:count]
