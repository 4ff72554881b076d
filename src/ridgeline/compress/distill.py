"""Distillation: a student learns the distributions of a teacher with the same vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.compress.pretrain import LossFunction
from ridgeline.compress.trainable import TrainableLlama


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationConfig:
    """Loss = ``kl_share`` KL(teacher ‖ student) + the rest of next-token cross-entropy."""

    kl_share: float = 0.9


def distillation_loss(
    *,
    teacher: TrainableLlama,
    student: TrainableLlama,
    config: DistillationConfig,
    dtype: torch.dtype = torch.float32,
) -> LossFunction:
    """Mean loss per token in nats (Hinton 2015, at temperature 1: what acceptance depends on).

    Matrix products are in ``dtype``, distributions in float32.
    """
    teacher.eval().requires_grad_(False)

    def loss(ids_BS: Tensor, next_BS: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            with torch.no_grad():
                wanted_BSV = teacher(ids_BS)
            got_BSV = student(ids_BS)
        wanted = functional.log_softmax(wanted_BSV.float(), dim=-1).flatten(0, 1)
        got = functional.log_softmax(got_BSV.float(), dim=-1).flatten(0, 1)
        divergence = (wanted.exp() * (wanted - got)).sum(dim=-1).mean()
        entropy = functional.nll_loss(got, next_BS.reshape(-1))
        return config.kl_share * divergence + (1 - config.kl_share) * entropy

    return loss
