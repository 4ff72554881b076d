"""Activations and the soft cap."""

import torch
from torch.nn import functional

from ridgeline.core.rope_spec import QueryGrowth
from ridgeline.core.spec import Activation, ClampedSwiGLU


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the type that reductions use: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The non-linearity of a feed-forward network, elementwise."""
    match activation:
        case Activation.SILU:
            return functional.silu(x)
        case Activation.GELU:
            return functional.gelu(x)
        case Activation.GELU_TANH:
            return functional.gelu(x, approximate="tanh")
        case Activation.RELU:
            return functional.relu(x)
        case Activation.RELU_SQUARED:
            return functional.relu(x).square()
        case Activation.IDENTITY:
            return x


def xielu(
    x: torch.Tensor, rise: torch.Tensor, fall: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    """`core.ops.Xielu`, elementwise (``XIELUActivation`` of transformers)."""
    above = functional.softplus(rise) * x * x
    below = (torch.expm1(torch.minimum(x, eps)) - x) * (beta + functional.softplus(fall))
    return torch.where(x > 0, above, below) + beta * x


def gated(
    gate: torch.Tensor | None, up: torch.Tensor, activation: Activation | ClampedSwiGLU
) -> torch.Tensor:
    """act(gate) · up, or gpt-oss's clamped variant of it, elementwise; act(up) without a gate."""
    if gate is None:
        assert not isinstance(activation, ClampedSwiGLU), "which has a gate"
        return activate(up, activation)
    if isinstance(activation, ClampedSwiGLU):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
    return activate(gate, activation) * up


def softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap · tanh(x / cap), elementwise; x itself where there is no cap (Gemma 2)."""
    return x if cap is None else torch.tanh(x / cap) * cap


def grow_queries(
    q_THd: torch.Tensor, growth: QueryGrowth, positions_T: torch.Tensor
) -> torch.Tensor:
    """`core.rope_spec.QueryGrowth` (``get_llama_4_attn_scale`` of transformers)."""
    turns_T = ((positions_T + growth.offset) // growth.length).float()
    factors_T = 1 + growth.rate * torch.log1p(turns_T)
    return q_THd * factors_T.to(q_THd.dtype)[:, None, None]
