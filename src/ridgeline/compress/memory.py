"""The memory that quantizing and pruning take, by a formula that is told before the start.

The largest of what is there at one time: a layer in float32, the sums of its largest matrix's
inputs with what is made of them (12 bytes for each pair of columns), the codes of the layer, rows
that are being rounded, and what one window's forward pass takes; or the embedding, or the head.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from ridgeline.compress.gptq import rows_at_once
from ridgeline.compress.layers import LayeredModel
from ridgeline.core import ops
from ridgeline.core.errors import OutOfMemoryError
from ridgeline.core.host import available_memory_bytes
from ridgeline.core.weight_uses import weight_uses
from ridgeline.evaluation import Document
from ridgeline.weights import weight_shapes

MOST_MIXING_WINDOWS = 8  # of a calibration, by which bits are chosen
EXPERT_SUMS_BYTES = 1 << 30  # of the experts whose inputs are summed at once
_SUM_BYTES, _SUMS_BYTES = 8, 12  # of a pair of columns: summing; and inverting
_ROUNDING_BYTES = 44  # of a weight of the rows that are being rounded
_PACKED_BYTES, _CODE_BYTES = 0.75, 3  # of a weight: in the shard; while its matrix is rounded
_KEPT_BYTES, _TUNING_BYTES = 6, 18  # of a weight: what tuning starts from; and tuning itself
_MOVING_BYTES = 16  # of a weight of a matrix whose codes are being moved
_LIBRARY_BYTES = 64 << 20  # of torch's own buffers, once products have run
_QUERY_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes beside what the process has already: ``layer`` and ``ends`` are each a peak."""

    layer_bytes: int
    ends_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.layer_bytes, self.ends_bytes) + _LIBRARY_BYTES

    def check(self, least: str) -> None:
        """
        Raises:
            OutOfMemoryError: it needs more than is free; names both, and ``least``, the setting
                that takes least.
        """
        free = available_memory_bytes()
        if self.peak_bytes > free:
            raise OutOfMemoryError(
                f"This takes a {self}, and {_gb(free)} are free. Shorter texts "
                f"(--window-tokens) take less, and {least} takes least."
            )

    def __str__(self) -> str:
        return (
            f"peak {_gb(self.peak_bytes)} of memory (a layer {_gb(self.layer_bytes)}, embedding or "
            f"head {_gb(self.ends_bytes)}) beside {_gb(psutil.Process().memory_info().rss)} now"
        )


def memory_need(
    model: LayeredModel,
    matrices: Sequence[Mapping[str, Sequence[int | None]]],
    windows: Sequence[Document],
    *,
    is_calibrated: bool,
    is_mixed: bool = False,
    is_tuned: bool = False,
) -> MemoryNeed:
    """The formula; ``matrices`` are those of each run that change, by weight. ``is_mixed``: their
    bits are chosen before; ``is_tuned``: and their codes tuned behind."""
    pass_bytes = _pass_bytes(model, max(map(len, windows), default=0))
    layers = [0]
    for run in range(1, len(model.runs) - 1):
        shapes = weight_shapes(model.runs[run])
        sums, rounding, largest = 0, 0, 0
        for name, places in matrices[run].items():
            rows, columns = shapes[name][-2:]
            if is_calibrated:
                at_once = min(len(places), max(1, EXPERT_SUMS_BYTES // (_SUM_BYTES * columns**2)))
                several = _SUM_BYTES * (at_once + (len(places) > 1)) + 4
                sums = max(sums, max(_SUMS_BYTES, several) * columns**2)
            at_work = min(rows, rows_at_once(columns))
            rounding = max(rounding, (_CODE_BYTES * rows + _ROUNDING_BYTES * at_work) * columns)
            largest = max(largest, rows * columns)
        weights = sum(math.prod(shapes[name]) for name in matrices[run])
        work = int(_PACKED_BYTES * weights) + max(sums + rounding, pass_bytes + sums)
        if is_tuned:
            moving = _TUNING_BYTES * weights + _MOVING_BYTES * largest
            work = max(work + _KEPT_BYTES * weights, moving + 3 * pass_bytes)
        layers.append(model.num_bytes(run) + work)
    if is_mixed:
        layers.append(_choosing_bytes(model, windows[:MOST_MIXING_WINDOWS]))
    ends = [model.num_bytes(0) + pass_bytes] if windows else [0]
    return MemoryNeed(layer_bytes=max(layers), ends_bytes=max(ends))


def _choosing_bytes(model: LayeredModel, windows: Sequence[Document]) -> int:
    """Of choosing bits: all streams; of a layer weights, gradients, inputs, rows of a pass."""
    tokens, width = sum(map(len, windows)), model.loaded.definition.spec.hidden_size
    layers = []
    for run in range(1, len(model.runs) - 1):
        columns = sum(shape[-1] for shape in weight_shapes(model.runs[run]).values())
        layers.append(2 * model.num_bytes(run) + 4 * tokens * columns)
    one_pass = 3 * _pass_bytes(model, max(map(len, windows), default=0))
    return 4 * tokens * width * len(model.runs) + max(layers) + one_pass


def _pass_bytes(model: LayeredModel, length: int) -> int:
    """Of a forward pass through a layer: the rows of its widest op, and scores of some queries."""
    widest = 0
    for some_ops in model.runs[1:2]:
        for op in some_ops:
            rows = sum(use.weight.shape[-2] for use in weight_uses(op) if use.role.is_matrix)
            heads = getattr(op, "num_heads", 0) if isinstance(op, ops.AttentionOp) else 0
            widest = max(widest, 4 * length * rows, 8 * heads * min(length, _QUERY_ROWS) * length)
    return widest + 6 * 4 * length * model.loaded.definition.spec.hidden_size


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
