"""Next-token cross-entropy that never holds all logits: T tokens, D hidden width, V vocabulary."""

from typing import Any

import torch
from torch import Tensor

TOKENS_PER_BLOCK = 512


class _BlockwiseCrossEntropy(torch.autograd.Function):
    """Loss and both gradients in one pass over blocks of tokens, whose logits stay in the cache."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, head_VD: Tensor, next_T: Tensor) -> Tensor:
        head = head_VD.to(hidden_TD.dtype)
        share = 1.0 / len(next_T)
        total = torch.zeros(())
        head_grad = torch.zeros_like(head_VD)
        hidden_grads: list[Tensor] = []
        for start in range(0, len(next_T), TOKENS_PER_BLOCK):
            hidden = hidden_TD[start : start + TOKENS_PER_BLOCK]
            targets = next_T[start : start + TOKENS_PER_BLOCK]
            logits = (hidden @ head.T).float()
            highest = logits.amax(dim=-1, keepdim=True)
            powers = (logits - highest).exp()
            sums = powers.sum(dim=-1, keepdim=True)
            chosen = logits.gather(1, targets[:, None])
            total = total + (sums.log() + highest - chosen).sum()
            wrong = (powers * (share / sums)).scatter_add(
                1, targets[:, None], torch.full_like(chosen, -share)
            )
            error = wrong.to(head.dtype)
            hidden_grads.append(error @ head)
            head_grad = head_grad + (error.T @ hidden).float()
        ctx.save_for_backward(torch.cat(hidden_grads), head_grad)
        return total * share

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        hidden_grad, head_grad = ctx.saved_tensors
        return hidden_grad * grads[0], head_grad * grads[0], None


def cross_entropy(*, hidden_TD: Tensor, head_VD: Tensor, next_T: Tensor) -> Tensor:
    """Mean cross-entropy in nats of ``next_T`` under softmax(hidden · headᵀ).

    Products are in the dtype of ``hidden_TD``; exponentials, sums and the head's gradient are in
    float32.
    """
    loss: Tensor = _BlockwiseCrossEntropy.apply(hidden_TD, head_VD, next_T)  # type: ignore[no-untyped-call]
    return loss
