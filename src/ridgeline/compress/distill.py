"""Distillation: a student learns the distributions of a teacher with the same vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.compress.pretrain import LossFunction, autocast


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationConfig:
    """Loss = ``kl_share`` KL(teacher ‖ student) + the rest of next-token cross-entropy.

    With ``top_k``, KL is over the teacher's ``top_k`` likeliest tokens and, as one, all others.
    """

    kl_share: float = 0.9
    top_k: int = 0


def distillation_loss(
    *,
    teacher: nn.Module,
    student: nn.Module,
    config: DistillationConfig,
    dtype: torch.dtype = torch.float32,
) -> LossFunction:
    """Mean loss per token in nats (Hinton 2015, at temperature 1: what acceptance depends on).

    Both give logits of token ids ``[B, S]``, ``[B, S, V]`` or ``[T, V]``. Matrix products are in
    ``dtype``, distributions in float32.
    """
    teacher.eval().requires_grad_(False)

    def loss(ids_BS: Tensor, next_BS: Tensor) -> Tensor:
        with autocast(dtype):
            with torch.no_grad():
                wanted_BSV = teacher(ids_BS)
            got_BSV = student(ids_BS)
        wanted = functional.log_softmax(wanted_BSV.float(), dim=-1).flatten(0, -2)
        got = functional.log_softmax(got_BSV.float(), dim=-1).flatten(0, -2)
        divergence = divergences(wanted, got, config.top_k).mean()
        entropy = functional.nll_loss(got, next_BS.reshape(-1))
        return config.kl_share * divergence + (1 - config.kl_share) * entropy

    return loss


def divergences(wanted_TV: Tensor, got_TV: Tensor, top_k: int = 0) -> Tensor:
    """KL(wanted ‖ got) of each token in nats, ``[T]``, from log-probabilities.

    With ``top_k``, of the distributions over the likeliest wanted tokens and all others as one:
    never more than of the whole ones (data processing).
    """
    if not top_k or top_k >= wanted_TV.shape[-1]:
        return (wanted_TV.exp() * (wanted_TV - got_TV)).sum(dim=-1)
    wanted_TK, indices_TK = wanted_TV.topk(top_k, dim=-1)
    got_TK = got_TV.gather(-1, indices_TK)
    wanted_rest, got_rest = (
        torch.log1p(-each.exp().sum(-1).clamp(max=1 - 1e-6)) for each in (wanted_TK, got_TK)
    )
    chosen = (wanted_TK.exp() * (wanted_TK - got_TK)).sum(dim=-1)
    return chosen + wanted_rest.exp() * (wanted_rest - got_rest)
