"""Which tensor of a checkpoint holds which weight: all shapes are checked before a byte is read."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ridgeline.core.arrays import Array, empty
from ridgeline.core.errors import UnsupportedModelError, WeightsMismatchError
from ridgeline.core.ops import Op
from ridgeline.core.weight_uses import op_weights
from ridgeline.models import TensorSource
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.gguf import GGUFCheckpoint
from ridgeline.weights.names import list_some, short_name
from ridgeline.weights.stacking import Places, RowRanges
from ridgeline.weights.store import TensorStore

# What needs no scale beside it; eight-bit floats do.
_PLAIN_FLOATS = {"float64", "float32", "float16", "bfloat16"}
_COMPARED_ELEMENTS = 1 << 22
_QUANTIZED_PARTS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".SCB")

AnyCheckpoint = Checkpoint | GGUFCheckpoint


def open_checkpoint(path: Path) -> AnyCheckpoint:
    """The checkpoint at ``path``: a folder of safetensors, or a GGUF file."""
    return GGUFCheckpoint(path) if path.suffix.lower() == ".gguf" else Checkpoint(path)


def weight_shapes(ops: Iterable[Op]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight that ``ops`` read, once each, in the order of first use."""
    shapes: dict[str, tuple[int, ...]] = {}
    for op in ops:
        for weight in op_weights(op):
            shape = shapes.setdefault(weight.name, weight.shape)
            assert shape == weight.shape, weight.name
    return shapes


def read_places(
    checkpoint: TensorStore,
    tensor: str,
    places: Places,
    dtype: str,
    advance: Callable[[int], None],
    entry: int | None = None,
) -> Iterator[tuple[str, Array]]:
    """The weights that a tensor holds, each in memory of its own.

    With ``entry``, that matrix of each: the tensor holds whole stacks, and no other matrix is read.
    """
    shape = checkpoint.shape(tensor)[0 if entry is None else 1 :]

    def read(out: Array, first_row: int = 0) -> Array:
        if entry is None:
            checkpoint.read_into(tensor, out, advance, first_row=first_row)
        else:
            checkpoint.read_into(tensor, out[None], advance, first_row=entry)
        return out

    whole = None
    if any(_is_cut_from_whole(place, len(checkpoint.shape(tensor))) for place in places):
        whole = read(empty(shape, dtype))
    for place, names in places.items():
        if whole is not None:
            part = whole if place.every_other is None else whole[..., place.every_other :: 2]
            part = part.swapaxes(-1, -2) if place.transpose else part
            if place.experts:
                part = part[slice(*place.experts)]
            if place.row_vector and part.ndim == 2:
                (part,) = part
            if place.rows:
                part = part[(*[slice(None)] * (part.ndim - 2), slice(*place.rows))]
            # Copied, since a transposed vector would otherwise be contiguous already.
            if place.of_each is not None:
                part = place.select_rows(part)
            weight = part.copy(order="C")
        else:
            start, stop = place.experts or place.rows or (0, shape[0] if shape else 0)
            weight = empty((stop - start, *shape[1:]) if shape else (), dtype)
            read(weight, start)
        if place.squeeze:
            weight = weight.squeeze(1)
        for name in names:
            yield name, weight
        del weight  # before the next one is read


def _is_cut_from_whole(place: TensorSource, axes: int) -> bool:
    """Whether a weight is not just a range of the first axis of its tensor, which has ``axes``."""
    cuts_stack = place.rows is not None and axes == 3
    is_row = place.row_vector and axes == 2
    takes_turns = place.every_other is not None or place.of_each is not None
    return place.transpose or takes_turns or cuts_stack or is_row


def match_tensors(
    checkpoint: TensorStore,
    shapes: Mapping[str, tuple[int, ...]],
    sources: Mapping[str, TensorSource],
    ignored: Sequence[str],
    rows: RowRanges | None = None,
    only: Collection[str] | None = None,
) -> dict[str, Places]:
    """Checkpoint tensor to the weights that it holds, in file order, once all of them fit.

    Their places are those of the wanted ``rows``; ``shapes`` are of whole weights. Copies are
    compared if ``only`` names what they are copies of, or is missing.
    """
    rows = rows or {}
    available = frozenset(checkpoint.names())
    sources, users = _users(checkpoint, shapes, sources)
    present = {tensor: users[tensor] for tensor in checkpoint.names() if tensor in users}
    missing = [tensor for tensor in users if tensor not in present]
    copies = {
        copy: tensor
        for tensor, names in users.items()
        for name in names
        if name in sources
        for copy in sources[name].copies
    }
    known = {*users, *copies, *checkpoint.spare}
    patterns = [re.compile(pattern) for pattern in ignored]
    left_over = [
        tensor
        for tensor in checkpoint.names()
        if tensor not in known and not any(pattern.fullmatch(tensor) for pattern in patterns)
    ]
    mis_shaped = [
        f"{short_name(tensor)} is {list(checkpoint.shape(tensor))}, not {list(shape)}"
        for tensor, names in present.items()
        for shape in stored_shapes(names, shapes, sources)
        if _as_vector(checkpoint.shape(tensor), names, sources) != shape
    ]
    if missing or left_over or mis_shaped:
        raise _mismatch(checkpoint.folder, missing, left_over, mis_shaped)
    for tensor in present:
        if checkpoint.dtype(tensor) not in _PLAIN_FLOATS:
            raise UnsupportedModelError(
                f"Tensor {short_name(tensor)} holds {checkpoint.dtype(tensor)} values: the "
                "checkpoint is quantized in a way that Ridgeline does not read."
            )
    for copy in available & copies.keys():
        names = users[copies[copy]]
        if only is None or any(name in only for name in names):
            wanted = next((rows[name] for name in names if name in rows), None)
            if not _same_values(checkpoint, copy, copies[copy], wanted):
                raise WeightsMismatchError(
                    "config.json ties the output to the input embeddings, and "
                    f"{short_name(copy)} differs from {short_name(copies[copy])}; set "
                    "tie_word_embeddings to false to use both, or remove the one that is wrong."
                )
    return {tensor: _places(users[tensor], shapes, sources, rows) for tensor in present}


def _users(
    checkpoint: TensorStore,
    shapes: Mapping[str, tuple[int, ...]],
    sources: Mapping[str, TensorSource],
) -> tuple[dict[str, TensorSource], dict[str, list[str]]]:
    """The sources, as this checkpoint has them, and the weights that each of its tensors holds."""
    available, found, users = frozenset(checkpoint.names()), dict(sources), dict[str, list[str]]()
    for name, shape in shapes.items():
        # A weight that the family does not know is missing under its own name.
        source = sources.get(name) or TensorSource(name=name)
        tensor = name_in(available, source)
        if source.either_way and tensor in available:
            turned = checkpoint.shape(tensor)[-1:] != shape[-1:]
            found[name] = replace(source, transpose=turned)
        users.setdefault(tensor, []).append(name)
    return found, users


def _places(
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    sources: Mapping[str, TensorSource],
    rows: RowRanges,
) -> Places:
    """Where in their tensor the wanted rows of weights are."""
    places: Places = {}
    for name in names:
        place = replace(sources[name], name="", other_names=(), copies=())
        if name in rows:
            place = _wanted(place, rows[name], is_stack=len(shapes[name]) == 3)
        places.setdefault(place, []).append(name)
    return places


def _wanted(place: TensorSource, rows: tuple[int, int], *, is_stack: bool) -> TensorSource:
    """The place of some rows of a weight, or of some matrices of a stack."""
    if is_stack:
        return replace(place, experts=rows)
    first = place.rows[0] if place.rows else 0
    return replace(place, rows=(first + rows[0], first + rows[1]))


def _same_values(
    checkpoint: TensorStore, name: str, other: str, wanted: tuple[int, int] | None
) -> bool:
    """Whether two matrices, or the wanted rows of them, are equal, read some rows at a time."""
    shape = checkpoint.shape(name)
    if shape != checkpoint.shape(other) or checkpoint.dtype(name) not in _PLAIN_FLOATS:
        return False
    start, stop = wanted or (0, shape[0])
    rows = max(1, _COMPARED_ELEMENTS // shape[1])
    pair = np.empty((2, min(rows, stop - start), shape[1]), dtype=np.float32)
    for first in range(start, stop, rows):
        some = pair[:, : stop - first]
        for out, tensor in zip(some, (name, other), strict=True):
            checkpoint.read_into(tensor, out, first_row=first)
        if not np.array_equal(*some):
            return False
    return True


def name_in(available: frozenset[str], source: TensorSource) -> str:
    """What a checkpoint calls a tensor; its first name if it has none of them."""
    names = (source.name, *source.other_names)
    return next((name for name in names if name in available), source.name)


def _as_vector(
    shape: tuple[int, ...], names: Sequence[str], sources: Mapping[str, TensorSource]
) -> tuple[int, ...]:
    """A tensor's shape; that of its only row, if it may be stored so."""
    is_row = len(shape) == 2 and shape[0] == 1
    return shape[1:] if is_row and all(sources[name].row_vector for name in names) else shape


def stored_shapes(
    names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], sources: Mapping[str, TensorSource]
) -> list[tuple[int, ...]]:
    """The shapes that a tensor must have to hold some weights: one, if they agree."""
    stops = [rows[1] for rows in (sources[name].rows for name in names) if rows is not None]
    expected: dict[tuple[int, ...], None] = {}
    for name in names:
        source, shape = sources[name], shapes[name]
        if source.rows is not None:
            *before, height, columns = shape if len(shape) > 1 else (*shape, 0)
            assert source.rows[1] - source.rows[0] == height, name
            shape = (*before, max(stops), columns)[: len(shape)]
        elif source.of_each is not None:
            shape = (source.stored_rows(shape[0]), *shape[1:])
        if source.squeeze:
            shape = (shape[0], 1, *shape[1:])
        if source.transpose:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if source.every_other is not None:
            shape = (*shape[:-1], 2 * shape[-1])
        expected[shape] = None
    return list(expected)


def _mismatch(
    folder: Path, missing: list[str], left_over: list[str], mis_shaped: list[str]
) -> WeightsMismatchError:
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing: {list_some(missing)}")
    if left_over:
        parts.append(f"{len(left_over)} left over: {list_some(left_over)}")
    if mis_shaped:
        more = f" and {len(mis_shaped) - 8} more" if len(mis_shaped) > 8 else ""
        parts.append(f"{len(mis_shaped)} of another shape: {', '.join(mis_shaped[:8])}{more}")
    quantized = next((name for name in left_over if name.endswith(_QUANTIZED_PARTS)), None)
    hint = ""
    if quantized is not None:
        hint = (
            f" {short_name(quantized)} is part of a quantized weight: the quantization_config of "
            "config.json is missing or names another method."
        )
    return WeightsMismatchError(
        f"The weights in {folder} do not fit its config ({'; '.join(parts)}).{hint}"
    )
