"""Muon for matrices, Adam for the rest, with state that is plain named tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ridgeline.compress.ranks import own_rows

# Quintic steps of Polar Express (Amsel et al. 2025, arXiv 2505.16932), for a norm below 1.02.
_POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Learning rates at the height of the schedule. Weight decay is per step, times the rate.

    Without ``muon`` all parameters are the others.
    """

    matrix_lr: float = 0.012
    other_lr: float = 0.0015
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    eps: float = 1e-10
    muon: bool = True
    dtype: torch.dtype = torch.float32  # of Muon's iterations


def orthogonalize(update_NRC: Tensor) -> Tensor:
    """The nearest orthogonal matrix, about, of each [R, C] matrix, in the dtype of the update."""
    tall = update_NRC.shape[-2] > update_NRC.shape[-1]
    x: Tensor = update_NRC.transpose(-2, -1) if tall else update_NRC
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in _POLAR_EXPRESS:
        gram = x @ x.transpose(-2, -1)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    orthogonal: Tensor = x.transpose(-2, -1) if tall else x
    return orthogonal


class MuonAdam:
    """Muon (Jordan et al. 2024) on decoder matrices, AdamW on embeddings, heads and norms.

    ``step`` changes the parameters and ``state``; ``state`` maps a name to a float32 tensor, so
    that a checkpoint is one safetensors file. Of parameters that are cut over ranks it is cut
    alike; Adam alone trains those.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.config = config
        self.state: dict[str, Tensor] = {}
        self.others: dict[str, nn.Parameter] = {}
        self.matrices: dict[torch.Size, dict[str, nn.Parameter]] = {}
        trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
        for name, parameter in trained:
            is_table = "embed_tokens" in name or "lm_head" in name
            if config.muon and parameter.ndim == 2 and not is_table:
                self.matrices.setdefault(parameter.shape, {})[name] = parameter
                self.state[f"{name}.momentum"] = torch.zeros_like(parameter)
            else:
                self.others[name] = parameter
                self.state[f"{name}.mean"] = torch.zeros_like(parameter)
                self.state[f"{name}.square"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, *, number: int, lr_scale: float) -> None:
        """Step ``number`` (from 0); ``lr_scale`` multiplies the learning rates."""
        for shape, group in self.matrices.items():
            self._step_matrices(shape, group, lr_scale)
        for name, parameter in self.others.items():
            self._step_adam(name, parameter, number, lr_scale)

    def _step_matrices(
        self, shape: torch.Size, group: dict[str, nn.Parameter], lr_scale: float
    ) -> None:
        directions: list[Tensor] = []
        for name, parameter in group.items():
            assert parameter.grad is not None
            momentum = self.state[f"{name}.momentum"]
            momentum.lerp_(parameter.grad, 1 - self.config.momentum)
            directions.append(parameter.grad.lerp(momentum, self.config.momentum))
            parameter.grad = None
        rate = self.config.matrix_lr * lr_scale
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        for parameter, direction in zip(
            group.values(),
            orthogonalize(torch.stack(directions).to(self.config.dtype)),
            strict=True,
        ):
            parameter.mul_(1 - rate * self.config.weight_decay)
            parameter.add_(direction, alpha=-rate * scale)

    def _step_adam(self, name: str, parameter: nn.Parameter, number: int, lr_scale: float) -> None:
        if parameter.grad is None:  # it had no part in the loss: experts without a token
            return
        beta1, beta2 = self.config.betas
        mean, square = (own_rows(self.state[f"{name}.{each}"]) for each in ("mean", "square"))
        grad = own_rows(parameter.grad)
        mean.lerp_(grad, 1 - beta1)
        square.lerp_(grad.square(), 1 - beta2)
        corrected = mean / (1 - beta1 ** (number + 1))
        rms = (square / (1 - beta2 ** (number + 1))).sqrt_().add_(self.config.eps)
        own_rows(parameter).addcdiv_(corrected, rms, value=-self.config.other_lr * lr_scale)
        parameter.grad = None
