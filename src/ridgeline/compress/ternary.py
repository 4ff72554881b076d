"""Training ternary weights: matrices that are seen as −1, 0 and 1 times a scale each.

The recipe of BitNet b1.58 (Ma et al. 2024, arXiv 2402.17764): the scale is the mean of |W|, inputs
are rounded to bytes with a scale for each token, and gradients go straight through both roundings
(Bengio et al. 2013, arXiv 1308.3432). Scales are those that bfloat16 holds, so that what is trained
is what the file says.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.tensors import products
from ridgeline.core.errors import UnsupportedModelError
from ridgeline.models import TensorSource
from ridgeline.weights import Checkpoint, weight_shapes
from ridgeline.weights.matching import name_in

_LEAST = 1e-5  # of a mean or a largest magnitude, as transformers has it
_LARGEST_BYTE = 127
_PACKED_ROWS = 4


class Ternary(nn.Module):
    """A matrix as its nearest codes times its scale; the gradient is that of the matrix."""

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            codes, scale = ternary_codes(weight)
        return weight + (codes * scale - weight).detach()


def ternary_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes −1, 0 and 1 of the shape of ``weight``, and the scale ``[]``, float32 both."""
    scale = weight.abs().mean().clamp(min=_LEAST).bfloat16().float()
    return (weight / scale).round().clamp(-1, 1), scale


@contextmanager
def rounding_inputs(matrices: Iterable[Tensor]) -> Iterator[None]:
    """Within, what is multiplied with ``matrices`` is rounded to bytes, a scale for each token."""
    keys = {matrix.data_ptr() for matrix in matrices}

    class Round(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is functional.linear and args[1].data_ptr() in keys:
                args = (_rounded(args[0]), *args[1:])
            return func(*args, **(kwargs or {}))

    with Round() if keys else nullcontext():
        yield


def _rounded(x_TI: Tensor) -> Tensor:
    with torch.no_grad():
        largest_T1 = x_TI.abs().amax(-1, keepdim=True).clamp(min=_LEAST)
        scale_T1 = _LARGEST_BYTE / largest_T1
        values = (x_TI * scale_T1).round() / scale_T1
    return x_TI + (values - x_TI).detach()


def ternary_tensors(model: LayeredModel, checkpoint: Checkpoint) -> Mapping[str, str]:
    """The tensor of each matrix that is made ternary, by canonical name: those of the layers.

    Raises:
        UnsupportedModelError: some are stored otherwise than one matrix a tensor; files of this
            format cannot say it.
    """
    found, available = dict[str, str](), frozenset(checkpoint.names())
    for run in model.runs[1:-1]:
        shapes = weight_shapes(run)
        for name, places in products(run).items():
            source = model.stored.sources[name]
            plain = TensorSource(name=source.name, other_names=source.other_names)
            if places != [None] or source != plain or shapes[name][0] % _PACKED_ROWS:
                raise UnsupportedModelError(
                    f"{name} cannot be ternary: BitNet's files have matrices of a tensor each, "
                    f"with a multiple of {_PACKED_ROWS} rows, and no experts."
                )
            found[name] = name_in(available, source)
    return found
