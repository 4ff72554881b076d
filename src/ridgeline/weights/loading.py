"""Weights of a checkpoint under their canonical names, all shapes checked before a byte is read."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from ridgeline.core.errors import UnsupportedModelError, WeightsMismatchError
from ridgeline.core.ops import Op, op_weights
from ridgeline.weights.checkpoint import Checkpoint, list_some
from ridgeline.weights.progress import Progress
from ridgeline.weights.safetensors_header import short_name


class NamedSource(Protocol):
    """Where a weight lies in a checkpoint; `models.registry.TensorSource` is one."""

    @property
    def name(self) -> str: ...


def weight_shapes(ops: Iterable[Op]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight that ``ops`` read, once each, in the order of first use."""
    shapes: dict[str, tuple[int, ...]] = {}
    for op in ops:
        for weight in op_weights(op):
            assert shapes.setdefault(weight.name, weight.shape) == weight.shape, weight.name
    return shapes


def load_weights(
    folder: Path,
    *,
    ops: Sequence[Op],
    sources: Mapping[str, NamedSource],
    ignored: Sequence[str],
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """All weights that ``ops`` read, by canonical name, in memory of their own.

    See `stream_weights` for the arguments and errors. Peak memory is the weights in ``dtype`` plus
    a few MiB.
    """
    return dict(
        stream_weights(
            folder, ops=ops, sources=sources, ignored=ignored, dtype=dtype, progress=progress
        )
    )


def stream_weights(
    folder: Path,
    *,
    ops: Sequence[Op],
    sources: Mapping[str, NamedSource],
    ignored: Sequence[str],
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (canonical name, weight) in file order, for callers that pack or move each in turn.

    ``sources`` says which tensor of the checkpoint each weight is; ``ignored`` are regular
    expressions for the full names of tensors that may be left over. A weight that several ops
    read, such as a tied head, comes once. Values are not looked at: NaN passes.

    Raises (at the first step, before any weight is read, unless a file fails later):
        WeightsMismatchError: tensors are missing, left over or of another shape; names them.
        UnsupportedModelError: a weight has a dtype that is not a plain floating-point one.
        ModelNotFoundError, CorruptFileError, DiskError: as `Checkpoint`.
    """
    shapes = weight_shapes(ops)
    with Checkpoint(folder) as checkpoint:
        names_of = _match(checkpoint, shapes, sources, ignored)
        total_bytes = sum(checkpoint.num_bytes(tensor) for tensor in names_of)
        done_bytes = 0
        for tensor, names in names_of.items():

            def advance(num_bytes: int, label: str = names[0]) -> None:
                nonlocal done_bytes
                done_bytes += num_bytes
                if progress is not None:
                    progress(done_bytes, total_bytes, label)

            weight = torch.empty(checkpoint.shape(tensor), dtype=dtype)
            checkpoint.read_into(tensor, weight, advance)
            for name in names:
                yield name, weight


def _match(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    sources: Mapping[str, NamedSource],
    ignored: Sequence[str],
) -> dict[str, list[str]]:
    """Checkpoint tensor to the weights that it is, in file order, once all of them fit."""
    users: dict[str, list[str]] = {}
    for name in shapes:
        users.setdefault(sources[name].name, []).append(name)
    present = {tensor: users[tensor] for tensor in checkpoint.names() if tensor in users}
    missing = [tensor for tensor in users if tensor not in present]
    patterns = [re.compile(pattern) for pattern in ignored]
    left_over = [
        tensor
        for tensor in checkpoint.names()
        if tensor not in users and not any(pattern.fullmatch(tensor) for pattern in patterns)
    ]
    mis_shaped = [
        f"{short_name(tensor)} is {list(checkpoint.shape(tensor))}, not {list(shapes[name])}"
        for tensor, names in present.items()
        for name in names
        if checkpoint.shape(tensor) != shapes[name]
    ]
    if missing or left_over or mis_shaped:
        raise _mismatch(checkpoint.folder, missing, left_over, mis_shaped)
    for tensor in present:
        if not checkpoint.dtype(tensor).is_floating_point:
            raise UnsupportedModelError(
                f"Tensor {short_name(tensor)} holds {checkpoint.dtype(tensor)} values: the "
                "checkpoint is quantized in a way that Ridgeline does not read."
            )
    return present


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
    return WeightsMismatchError(
        f"The weights in {folder} do not fit its config ({'; '.join(parts)})."
    )
