"""Which ops have a native kernel, and which fall back to the reference's."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import get_args

from ridgeline.core import ops
from ridgeline.core.errors import MissingDependencyError, SettingsError
from ridgeline.core.extras import install_command
from ridgeline.executors.cpu.lowering import lowered_ops
from ridgeline.executors.traits import has_torch

_log = logging.getLogger(__name__)

# Besides those lowered, the op before does the work, or the caller of the program does.
_NATIVE = (
    *lowered_ops(), ops.GatherContext, ops.GatherSplits, *get_args(ops.StageOp | ops.FeatureOp),
)  # fmt: skip
_NO_FALLBACK = (
    ops.KVWrite, ops.Attend, ops.LatentAttend, ops.BidirectionalAttend, ops.ShortConv,
    ops.GatedDelta, ops.SelectiveScan, ops.Head,
)  # fmt: skip


def ops_without_kernel() -> tuple[str, ...]:
    """Names of all ops that the reference would have to run."""
    return tuple(kind.__name__ for kind in get_args(ops.Op) if kind not in _NATIVE)


def fallback_ops(model_ops: Sequence[ops.Op]) -> tuple[ops.Op, ...]:
    """Those that the reference has to run, which the log says.

    Raises:
        SettingsError: one of them works on the KV cache, whose layout is the kernels' own, or on
            states, or is the head.
        MissingDependencyError: the reference's torch is not installed.
    """
    found = tuple(op for op in model_ops if not isinstance(op, _NATIVE))
    for op in found:
        if isinstance(op, _NO_FALLBACK):
            raise SettingsError(
                f"The cpu executor has no kernel for {type(op).__name__}, and the reference's "
                "cannot read its KV cache; use the reference executor."
            )
    if found and not has_torch():
        names = ", ".join(sorted({type(op).__name__ for op in found}))
        raise MissingDependencyError(
            f"The cpu executor has no kernel for {names}, which the reference runs, and that "
            f"needs PyTorch: {install_command('torch')}."
        )
    if found:
        counts = Counter(type(op).__name__ for op in found)
        _log.warning(
            "The cpu executor has no kernel for %s: the reference runs them, slowly, and decode "
            "steps are not replayed.",
            ", ".join(f"{count} {name}" for name, count in counts.items()),
        )
    return found
