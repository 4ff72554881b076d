"""Any model as a function of its weights, layer by layer: for gradients, and for seeing inputs.

The ops are those that the reference executor runs, so that a family that Ridgeline serves can be
calibrated, trained and distilled without code of its own. There is no KV cache: K and V are those
of the sequences at hand.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ridgeline.core import ops
from ridgeline.core.weight_uses import op_weights
from ridgeline.executors.reference import latent
from ridgeline.executors.reference.states import run_state_op
from ridgeline.executors.reference.token_ops import TokenOps, Tokens
from ridgeline.kernels import reference as kernels

_QUERY_ROWS = 256  # whose scores are there at once

Key = tuple[str, int | None]
"""A matrix: a weight's name, and its place in a stack of experts."""


class BlockForward(TokenOps):
    """One pass over whole sequences, one behind the other, with causal attention within each.

    ``weights`` may compute what it is asked for: fake-quantized, masked or gathered weights. With
    ``x_TD`` the pass goes on from the residual stream behind some layer. Gradients reach whatever
    the weights and ``x_TD`` came from.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        token_ids: Sequence[Sequence[int]],
        *,
        x_TD: torch.Tensor | None = None,
    ) -> None:
        lengths = [len(sequence) for sequence in token_ids]
        positions = torch.cat([torch.arange(length) for length in lengths])
        super().__init__(
            weights,
            (),
            Tokens(
                ids_T=torch.tensor([token for sequence in token_ids for token in sequence]),
                positions_T=positions,
                # A prompt's tokens all see the frequencies of its length; see `rope_length`.
                rope_lengths_T=torch.cat([torch.full((n,), n) for n in lengths]),
                adapters=(),
                types_T=torch.zeros_like(positions),
            ),
        )
        self._lengths = lengths
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # by layer
        if x_TD is not None:
            self.buffers["x"] = x_TD

    def run(self, some_ops: Sequence[ops.Op]) -> torch.Tensor:
        """Run ops in order and give the residual stream ``[T, D]`` behind them."""
        for op in some_ops:
            self.step(op)
        return self.buffers["x"]

    def step(self, op: ops.Op) -> None:
        """Run one op; the head leaves logits ``[T, V]`` in the buffer ``logits``."""
        match op:
            case ops.KVWrite():
                self.kv[op.layer] = self.buffers["k"], self.buffers.get("v")
            case ops.Attend() | ops.LatentAttend():
                self.buffers["h"] = torch.cat(list(self._attended(op))).flatten(1)
            case ops.ShortConv() | ops.GatedDelta() | ops.SelectiveScan():
                self.buffers["h"] = run_state_op(
                    op, self.buffers, self._ranges(), self._states(op), self._weight
                )
            case ops.Head():
                rows = functional.linear(
                    self.buffers["h"], self._weight(op.weight), self._optional(op.bias)
                )
                self.buffers["logits"] = kernels.softcap(kernels.wide(rows) * op.scale, op.softcap)
            case _:
                super().step(op)

    def _ranges(self) -> Iterator[tuple[None, int, int]]:
        for first, last in pairwise(accumulate(self._lengths, initial=0)):
            yield None, first, last

    def _states(self, op: ops.StateOp) -> "_FreshStates":
        return _FreshStates(op.state_elements, kernels.wide(self.buffers["q"]).dtype)

    def _attended(self, op: ops.Attend | ops.LatentAttend) -> Iterator[torch.Tensor]:
        """Attention output ``[S, H, v]`` of some rows of each sequence after the other."""
        first, (k_TKd, v_TKd) = 0, self.kv[op.layer]
        for length in self._lengths:
            part = slice(first, first + length)
            q_SHd, k_CKd = self.buffers["q"][part], k_TKd[part]
            for start in range(0, length, _QUERY_ROWS):
                stop = min(start + _QUERY_ROWS, length)
                low = kernels.first_visible(start, op.window, chunked=op.chunked)
                seen = kernels.visible(
                    query_positions_S=torch.arange(start, stop),
                    key_positions_C=torch.arange(low, stop),
                    drafted_SD=None,
                    window=op.window,
                    chunked=op.chunked,
                )
                rows = q_SHd[start:stop]
                if isinstance(op, ops.LatentAttend):
                    yield latent.attend(op, rows, k_CKd[low:stop], seen, self._weight)
                else:
                    assert v_TKd is not None
                    yield kernels.attend(
                        rows,
                        k_CKd[low:stop],
                        v_TKd[part][low:stop],
                        seen,
                        scale=op.scale,
                        cap=op.softcap,
                        sinks_H=self._optional(op.sinks),
                    )
            first += length


class _FreshStates:
    """Those of sequences that begin here, and of which nothing is kept."""

    def __init__(self, num_elements: int, dtype: torch.dtype) -> None:
        self._zeros_E = torch.zeros(num_elements, dtype=dtype)

    def before(self, item: None) -> torch.Tensor:
        return self._zeros_E

    def taken_in(self, item: None, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rows

    def wanted(self, item: None) -> Mapping[int, Sequence[int]]:
        return {}

    def write(self, blocks: Sequence[int], *parts: torch.Tensor) -> None:
        pass


def layer_ops(model_ops: Sequence[ops.Op]) -> list[tuple[ops.Op, ...]]:
    """The ops in runs between which the residual stream is all that is alive.

    First the embedding, then each layer, with those behind it that read its K and V, and then the
    final norm and the head.
    """
    runs: list[tuple[ops.Op, ...]] = []
    run_of: dict[int, int] = {}  # that K and V of a layer are written in
    for run in single_layers(model_ops):
        reads = [op.layer for op in run if isinstance(op, ops.Attend | ops.LatentAttend)]
        first = min([len(runs), *(run_of[layer] for layer in reads if layer in run_of)])
        runs[first:] = [tuple(op for each in (*runs[first:], run) for op in each)]
        run_of |= {op.layer: first for op in runs[first] if isinstance(op, ops.KVWrite)}
    return runs


def single_layers(model_ops: Sequence[ops.Op]) -> list[tuple[ops.Op, ...]]:
    """The ops of the embedding, of each layer, which ends where its last branch joins, and of the
    final norm and the head.
    """
    runs: list[tuple[ops.Op, ...]] = [(model_ops[0],)]
    branch: list[ops.Op] = []
    layer = None
    for op in model_ops[1:]:
        branch.append(op)
        if isinstance(op, ops.AddResidual):
            names = (weight.name for each in branch for weight in op_weights(each))
            before, layer = layer, next(name.split(".")[1] for name in names if "." in name)
            runs[-1:] = [(*runs[-1], *branch)] if layer == before else [runs[-1], tuple(branch)]
            branch = []
    return [*runs, tuple(branch)]


@contextmanager
def seeing_inputs(
    weights: Mapping[str, torch.Tensor], see: Callable[[Key, torch.Tensor], None]
) -> Iterator[None]:
    """Within, ``see`` gets each matrix of ``weights`` with the rows ``[T, in]`` it multiplies.

    Inputs are seen where torch multiplies, whichever op that belongs to.
    """
    keys: dict[int, Key] = {}
    for name, weight in weights.items():
        if weight.ndim == 2:
            keys[weight.data_ptr()] = name, None
        elif weight.ndim == 3:
            keys |= {weight[index].data_ptr(): (name, index) for index in range(len(weight))}

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is functional.linear and (key := keys.get(args[1].data_ptr())) is not None:
                see(key, args[0])
            return func(*args, **(kwargs or {}))

    with Watch():
        yield
