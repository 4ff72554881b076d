"""Penalties and logit bias, applied to a row of logits before the native sampler draws from it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ridgeline.core.sampling_params import SamplingParams


def adjust(
    logits_V: npt.NDArray[np.float32],
    params: SamplingParams,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
) -> npt.NDArray[np.float32]:
    """A copy of the row, changed as `ridgeline.decoding.sampling.process_logits` does it.

    ``token_ids`` are all tokens before the one that is drawn.
    """
    row = logits_V.copy()
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if not params.has_penalties:
        return row
    history = np.array(token_ids, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        factor = np.float32(params.repetition_penalty)
        seen = np.unique(history)
        kept = row[seen]
        row[seen] = np.where(kept > 0, kept / factor, kept * factor)
    output, counts = np.unique(history[num_prompt_tokens:], return_counts=True)
    row[output] -= np.float32(params.frequency_penalty) * counts + np.float32(
        params.presence_penalty
    )
    return row
