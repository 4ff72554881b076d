"""Any model that Ridgeline serves, for training: its weights are parameters, its ops the forward.

Shapes: B sequences, S positions, V vocabulary, O outputs and I inputs of a matrix, r rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.compress.block_forward import BlockForward
from ridgeline.compress.pretrain import fast_dtype
from ridgeline.compress.ternary import Ternary, rounding_inputs
from ridgeline.core import ops

_DENSE = (
    ops.Embed, ops.Norm, ops.QKVProject, ops.HeadNorm, ops.Rope, ops.KVWrite, ops.Attend,
    ops.OutProject, ops.MLP, ops.AddResidual, ops.Head,
)  # fmt: skip


class BlockModel(nn.Module):
    """Weights by canonical name, some of them trained, some seen through views.

    A view computes what the ops read from what is stored: masked, fake-quantized, adapted. Only
    trained weights and what views hold are in the ``state_dict``.
    """

    def __init__(
        self,
        model_ops: Sequence[ops.Op],
        weights: Mapping[str, Tensor],
        *,
        is_trained: Callable[[str], bool],
        views: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self._ops = model_ops
        self._names = {name: name.replace(".", "/") for name in weights}  # torch has no dots
        for name, weight in weights.items():
            if is_trained(name):
                self.register_parameter(self._names[name], nn.Parameter(weight))
            else:
                self.register_buffer(self._names[name], weight, persistent=False)
        self.views = nn.ModuleDict(
            {self._names[name]: view for name, view in (views or {}).items()}
        )

    def weights(self) -> dict[str, Tensor]:
        """What the ops read, by canonical name."""
        found: dict[str, Tensor] = {}
        for name, key in self._names.items():
            stored = getattr(self, key)
            found[name] = self.views[key](stored) if key in self.views else stored
        return found

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """What is stored, by canonical name."""
        for name, key in self._names.items():
            yield name, getattr(self, key).detach()

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Logits ``[B, S, V]``."""
        return torch.unflatten(self.logits(ids_BS.tolist()), 0, (len(ids_BS), -1))

    def logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Logits ``[T, V]`` of sequences of any lengths, one behind the other."""
        weights = self.weights()
        forward = BlockForward(weights, sequences)
        ternary = {key for key, view in self.views.items() if isinstance(view, Ternary)}
        seen = (w for n, w in weights.items() if self._names[n] in ternary)
        with rounding_inputs(seen):
            for op in self._ops:
                forward.step(op)
        return forward.buffers["logits"]


class Masked(nn.Module):
    """Zeros stay zero, and get no gradient."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._kept = weight != 0

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self._kept


class LowRankView(nn.Module):
    """W + scale · B A (Hu et al. 2021, arXiv 2106.09685): ``down`` A [r, I], ``up`` B [O, r].

    A is random, B zero: at the start nothing changes.
    """

    def __init__(self, weight: Tensor, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        random = torch.rand(rank, inputs, generator=generator) * 2 - 1
        self.down = nn.Parameter(random * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.up @ self.down)


def training_dtype(model_ops: Sequence[ops.Op]) -> torch.dtype:
    """What products are computed in: `fast_dtype` where all ops are known to take it."""
    return fast_dtype() if all(isinstance(op, _DENSE) for op in model_ops) else torch.float32


def next_token_loss(model: nn.Module, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean cross-entropy of the next token, in nats; matrix products are in ``dtype``."""

    def loss(ids_BS: Tensor, next_BS: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits_BSV = model(ids_BS)
        return functional.cross_entropy(logits_BSV.float().flatten(0, 1), next_BS.flatten())

    return loss
