"""Which tensors of a checkpoint are quantized, and which matrices lie in each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ridgeline.compress.block_forward import Key
from ridgeline.compress.grids import Grid
from ridgeline.compress.layers import LayeredModel, Run
from ridgeline.core.errors import UnsupportedModelError
from ridgeline.core.op_facts import Role
from ridgeline.core.weight_uses import weight_roles, weight_uses
from ridgeline.models import TensorSource
from ridgeline.weights import Checkpoint, weight_shapes
from ridgeline.weights.matching import match_tensors
from ridgeline.weights.stacking import split_stacks

_WEIGHT = ".weight"
_PLAIN = TensorSource(name="")  # the place of a weight that is a tensor as it is
GridOf = Callable[[str, int], Grid | None]
"""The grid of a weight with rows of so many columns; ``None`` if it has none."""

OUTSIDE = -1  # the run of what belongs to no layer


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of the checkpoint.

    Attributes:
        name: in the checkpoint.
        run: that it is written with: a layer's, or `OUTSIDE`.
        matrices: that are quantized, in the order of their rows; empty for what stays as it is.
        weight: that it is, by canonical name, where it is one as a whole.
        left: why a matrix of a layer stays as it is, where a user might expect otherwise.
    """

    name: str
    run: int
    matrices: tuple[Key, ...] = ()
    weight: str | None = None
    left: str | None = None

    @property
    def module(self) -> str:
        return self.name.removesuffix(_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """All tensors, and the modules that the file's config must name as left alone."""

    tensors: tuple[StoredTensor, ...]
    ignored_modules: tuple[str, ...]

    @property
    def quantized(self) -> frozenset[str]:
        """The weights, by canonical name, of which some matrix is quantized."""
        return frozenset(name for tensor in self.tensors for name, _ in tensor.matrices)

    def of_run(self, run: int) -> list[StoredTensor]:
        return [tensor for tensor in self.tensors if tensor.run == run]


def plan_tensors(model: LayeredModel, checkpoint: Checkpoint, grid_of: GridOf) -> TensorPlan:
    """Quantize the products of the layers; embeddings, head, routers and the rest stay.

    Raises:
        WeightsMismatchError: the checkpoint does not fit its config.
        UnsupportedModelError: no matrix of a layer can be quantized, or experts lie in one tensor.
    """
    stored = model.stored
    roles = weight_roles(stored.ops)
    run_of = {
        name: run
        for run, some_ops in enumerate(model.runs[1:-1], start=1)
        for name in weight_shapes(some_ops)
    }
    shapes, sources, stacks = split_stacks(weight_shapes(stored.ops), stored.sources)
    places_of = match_tensors(checkpoint, shapes, sources, stored.ignored)
    tensors, ignored = [], []
    for tensor in checkpoint.names():
        places = places_of.get(tensor, {})
        keys = [(place, stacks.place(name)) for place, names in places.items() for name in names]
        run = run_of.get(keys[0][1][0], OUTSIDE) if keys else OUTSIDE
        columns = checkpoint.shape(tensor)[-1:]
        is_product = run != OUTSIDE and all(roles[key[0]] == {Role.PRODUCT} for _, key in keys)
        left = None
        if is_product:
            if any(place.transpose or place.every_other is not None for place, _ in keys):
                left = "its matrix is stored transposed"
            elif len(checkpoint.shape(tensor)) != 2:
                left = "its experts are stored in one tensor"
            elif any(grid_of(key[0], columns[0]) is None for _, key in keys):
                left = f"its {columns[0]} columns are no whole groups"
        if is_product and left is None:
            rows = sorted((place.rows or (0, 0), key) for place, key in keys)
            matrices = tuple(key for _, key in rows)
            tensors.append(StoredTensor(name=tensor, run=run, matrices=matrices))
            continue
        whole = keys[0][1] if len(keys) == 1 and keys[0][0] == _PLAIN else (None, None)
        weight = whole[0] if whole[1] is None else None
        tensors.append(StoredTensor(name=tensor, run=run, left=left, weight=weight))
        is_matrix = any(role.is_matrix for _, key in keys for role in roles[key[0]])
        is_table = any(role.is_table for _, key in keys for role in roles[key[0]])
        if is_matrix and not is_table and tensor.endswith(_WEIGHT):
            ignored.append(tensor.removesuffix(_WEIGHT))
    plan = TensorPlan(tensors=tuple(tensors), ignored_modules=_with_head(ignored))
    if not plan.quantized:
        reasons = sorted({each.left for each in tensors if each.left})
        raise UnsupportedModelError(
            f"No matrix of this model can be quantized so: {'; '.join(reasons) or 'it has none'}."
        )
    return plan


def _with_head(modules: Sequence[str]) -> tuple[str, ...]:
    """A tied head has no tensor, and is a linear layer all the same."""
    return (*modules,) if "lm_head" in modules else (*modules, "lm_head")


def products(run: Run) -> dict[str, list[int | None]]:
    """The weights of a run that tokens are multiplied with, and the places in each stack."""
    uses = (use for op in run for use in weight_uses(op) if use.role is Role.PRODUCT)
    return {
        use.weight.name: list(range(use.weight.shape[0])) if use.is_stacked else [None]
        for use in uses
    }


def matrices_by_weight(plan: TensorPlan, run: int) -> Mapping[str, list[int | None]]:
    """The weights of a run that are quantized, and the places of the matrices in each stack."""
    found: dict[str, list[int | None]] = {}
    for tensor in plan.of_run(run):
        for name, index in tensor.matrices:
            found.setdefault(name, []).append(index)
    return found
