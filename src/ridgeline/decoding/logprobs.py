"""Log-probabilities of chosen tokens and of their alternatives."""

import torch

from ridgeline.core.result import TokenLogprobs


def token_logprobs(logits_V: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probability and rank of ``token_id`` under raw logits, with the ``num_top`` best."""
    logprobs = logits_V.double().log_softmax(-1)
    best = logprobs.topk(min(num_top, len(logprobs)))
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logprobs[token_id]),
        rank=int((logprobs > logprobs[token_id]).sum()) + 1,
        top=tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
    )
