"""Importance matrices of our own: what a model's matrices see while it reads texts."""

from collections.abc import Callable, Mapping, Sequence

import torch

from ridgeline.compress.block_forward import BlockForward, seeing_inputs
from ridgeline.core.errors import UnsupportedModelError
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.tensors import as_tensor
from ridgeline.models import TensorSource
from ridgeline.weights import expanded_weights
from ridgeline.weights.gguf.imatrix import Importance
from ridgeline.weights.gguf.names import ARCHITECTURE_OF, ARCHITECTURES

OnWindow = Callable[[int, int], None]


@torch.no_grad()
def collect_importance(
    model: ExecutorModel,
    windows: Sequence[Sequence[int]],
    *,
    dataset: str,
    on_window: OnWindow = lambda _done, _total: None,
) -> Importance:
    """Run token windows through the model and add up the squares of every matrix's inputs.

    All weights are in memory. ``dataset`` is what the file will say of the texts.

    Raises:
        UnsupportedModelError: the model has no place in GGUF, so that its matrices have no names.
    """
    if model.spec.model_type not in ARCHITECTURE_OF:
        raise UnsupportedModelError(
            f"Models of type {model.spec.model_type} are not written as GGUF; those that are: "
            f"{', '.join(ARCHITECTURE_OF)}."
        )
    weights = {
        name: as_tensor(values)
        for name, values in expanded_weights(model.weights, "float32").items()
    }
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, torch.Tensor] = {}

    def see(key: tuple[str, int | None], rows_TI: torch.Tensor) -> None:
        name, index = key
        matrices = 1 if index is None else len(weights[name])
        if name not in sums:
            sums[name] = torch.zeros((matrices, rows_TI.shape[-1]), dtype=torch.float64)
            counts[name] = torch.zeros(matrices, dtype=torch.float64)
        sums[name][index or 0] += rows_TI.double().square().sum(0)
        counts[name][index or 0] += len(rows_TI)

    with seeing_inputs(weights, see):
        for done, window in enumerate(windows):
            BlockForward(weights, [window]).run(model.ops)
            on_window(done + 1, len(windows))
    tensors = ARCHITECTURES[ARCHITECTURE_OF[model.spec.model_type]].tensors
    names = {name: _tensor_name(name, tensors) for name in sums}
    return Importance(
        sums={names[name]: values.float().numpy() for name, values in sums.items()},
        counts={names[name]: values.float().numpy() for name, values in counts.items()},
        chunks=len(windows),
        chunk_tokens=max(map(len, windows)),
        datasets=(dataset,),
    )


def _tensor_name(weight: str, tensors: Mapping[str, TensorSource]) -> str:
    """What GGUF calls a weight, such as ``layers.3.q``."""
    first, _, rest = weight.partition(".")
    if first != "layers":
        return tensors[weight].name
    layer, _, module = rest.partition(".")
    return tensors[f"layers.{{i}}.{module}"].in_layer(int(layer)).name
