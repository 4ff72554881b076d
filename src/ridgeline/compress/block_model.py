"""Any model that Ridgeline serves, for training: its weights are parameters, its ops the forward.

Shapes: T tokens, D hidden width, V vocabulary, O outputs and I inputs of a matrix, r rank.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ridgeline.compress.block_forward import BlockForward
from ridgeline.compress.layers import LayeredModel, Run
from ridgeline.compress.layerwise import check_finite
from ridgeline.compress.pretrain import autocast, fast_dtype
from ridgeline.compress.ranks import ALONE, TrainingRanks, gathered
from ridgeline.compress.ternary import Ternary, rounding_inputs
from ridgeline.core import ops
from ridgeline.weights import weight_shapes

_DENSE = (
    ops.Embed, ops.Norm, ops.QKVProject, ops.HeadNorm, ops.Rope, ops.KVWrite, ops.Attend,
    ops.OutProject, ops.MLP, ops.AddResidual, ops.Head,
)  # fmt: skip
Sequences = Sequence[Sequence[int]]


class BlockLayer(nn.Module):
    """A run of ops with its weights, from one residual stream to the next."""

    def __init__(
        self, run: Run, weights: Mapping[str, nn.Parameter], views: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self._ops = run
        self._keys = {name: name.replace(".", "/") for name in weights}  # torch has no dots
        for name, weight in weights.items():
            self.register_parameter(self._keys[name], weight)
        self.views = nn.ModuleDict({self._keys[name]: view for name, view in views.items()})

    def weights(self, *, bare: bool = False) -> dict[str, Tensor]:
        """What the ops read, by canonical name; ``bare``, without views."""
        found: dict[str, Tensor] = {}
        for name, key in self._keys.items():
            stored = getattr(self, key)
            found[name] = self.views[key](stored) if key in self.views and not bare else stored
        return found

    def copies(self, *, bare: bool = False) -> dict[str, Tensor]:
        """The values of `weights`, in memory of their own."""
        return {name: each.detach().clone() for name, each in self.weights(bare=bare).items()}

    def forward(self, x_TD: Tensor | None, sequences: Sequences, bare: bool) -> Tensor:
        """The residual stream behind the ops, or the head's logits ``[T, V]``.

        Of a layer that is cut, the graph keeps what comes in alone, and no weights as they were
        gathered, cast or seen: the layer is computed again when gradients reach it.
        """
        if not (isinstance(self, FSDPModule) and torch.is_grad_enabled()):
            return self._run(x_TD, sequences, bare)
        out: Tensor = checkpoint(
            self._run, x_TD, sequences, bare, use_reentrant=False, preserve_rng_state=False
        )
        return out

    def _run(self, x_TD: Tensor | None, sequences: Sequences, bare: bool) -> Tensor:
        weights = self.weights(bare=bare)
        forward = BlockForward(weights, sequences, x_TD=x_TD)
        ternary = {key for key, view in self.views.items() if isinstance(view, Ternary)}
        rounded = () if bare else (w for n, w in weights.items() if self._keys[n] in ternary)
        with rounding_inputs(rounded):
            x_TD = forward.run(self._ops)
        return forward.buffers.get("logits", x_TD)


class BlockModel(nn.Module):
    """A model's layers, some of whose weights are trained, and some seen through views.

    A view computes what the ops read from what is stored: masked, fake-quantized, adapted. Of
    several ``ranks`` each has a part of every weight, and loads one layer at a time.

    Args:
        is_trained: by canonical name.
        view: of a weight by its canonical name and values, if it has one.
        weights: of a run, float32; default: the model's own.

    Raises:
        CorruptFileError: a value is not finite.
    """

    def __init__(
        self,
        model: LayeredModel,
        *,
        is_trained: Callable[[str], bool] = lambda _: False,
        view: Callable[[str, Tensor], nn.Module | None] = lambda *_: None,
        weights: Callable[[int], Mapping[str, Tensor]] | None = None,
        ranks: TrainingRanks = ALONE,
    ) -> None:
        super().__init__()
        uses = Counter(name for run in model.runs for name in weight_shapes(run))
        shared: dict[str, nn.Parameter] = {}
        together: list[nn.Module] = []
        self.layers = nn.ModuleList()
        for number, run in enumerate(model.runs):
            own: dict[str, nn.Parameter] = {}
            views: dict[str, nn.Module] = {}
            for name, weight in (weights or model.weights)(number).items():
                check_finite(name, weight.numpy())
                if (seen := view(name, weight)) is not None:
                    views[name] = seen
                known = shared.get(name)
                own[name] = nn.Parameter(weight, is_trained(name)) if known is None else known
            shared |= {name: weight for name, weight in own.items() if uses[name] > 1}
            layer = BlockLayer(run, own, views)
            self.layers.append(layer)
            if shared.keys() & own.keys():
                together.append(layer)
            else:
                ranks.shard(layer)
        if together:
            ranks.shard(*together)
        ranks.shard(self)

    def forward(self, ids: Tensor | Sequences, *, bare: bool = False) -> Tensor:
        """Logits ``[T, V]`` of sequences of any lengths, one behind the other; ``bare``, of the
        model without its views."""
        sequences = ids.tolist() if isinstance(ids, Tensor) else ids
        x: Tensor | None = None
        for layer in self.layers:
            x = layer(x, sequences, bare)
        assert x is not None
        return x

    @contextmanager
    def layer(self, number: int) -> Iterator[BlockLayer]:
        """A layer with all rows of its weights, for which all ranks must ask."""
        layer = self.layers[number]
        assert isinstance(layer, BlockLayer)
        with gathered(layer):
            yield layer


class Masked(nn.Module):
    """Zeros stay zero, and get no gradient."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (weight != 0)


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
        with autocast(dtype):
            logits_TV = model(ids_BS)
        return functional.cross_entropy(logits_TV.float(), next_BS.flatten())

    return loss
