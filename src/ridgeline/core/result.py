"""`StepResult`: what came out of a `StepPlan`."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probability of one token under the raw model, and the most likely alternatives.

    ``rank`` is 1 for the most likely token. ``top`` holds (token id, log-probability), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class SegmentResult(NamedTuple):
    """What one segment yielded.

    ``token_ids``: accepted drafts, then the token drawn after them; for ``num_steps`` > 1, the
    tokens in order. Empty although a sample was wanted: no token was possible (an empty mask, or
    logits that are not numbers), or the segment was void (see `Segment`). ``accepted``: indices of
    the accepted drafts, in order of their depth. ``logprobs``: one per token, where the request
    asked for them. ``prompt_logprobs``: entry i is for the token that follows position
    ``start + i``. ``logits``: float32 ``[tokens, vocabulary]``. ``pooled``: float32 ``[hidden]``.
    ``candidates``: one for each token, with the likeliest in its place, where they were asked for.
    ``drawn``: the tokens after the last known one and after each draft, where they were asked for;
    −1 where none is possible.
    ``parents``: of the ``token_ids`` of a tree that a draft model grew, as in `Segment`.
    """

    token_ids: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    logits: npt.NDArray[np.float32] | None = None
    pooled: npt.NDArray[np.float32] | None = None
    parents: tuple[int, ...] = ()
    candidates: tuple[TokenLogprobs, ...] = ()
    drawn: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """Seconds within the executor: preparing inputs, the forward passes, sampling, and the sum."""

    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """``passes[p][s]`` is the outcome of segment s of pass p of the plan with this ``step_id``.

    ``aborted``: the step was told to stop early; what is reported is valid, and a replay may be
    short. ``experts_read``: expert networks that the target's passes read, summed over layers and
    passes; ``None`` where the executor does not count them.
    """

    step_id: int
    passes: tuple[tuple[SegmentResult, ...], ...]
    timings: StepTimings = StepTimings()
    aborted: bool = False
    experts_read: int | None = None
