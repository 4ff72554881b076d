"""The ops of drafters that read hidden states: copies between native buffers and those kept."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ridgeline.core.ops import AddInner, FeatureOp, JoinFeatures, KeepFeatures, ReadFeatures
from ridgeline.executors.cpu.batch import CPUBatch
from ridgeline.executors.cpu.lowering import BUFFERS
from ridgeline.executors.cpu.program import Program
from ridgeline.executors.features import PassFeatures, depths_of_rows


def run_feature_op(
    op: FeatureOp, features: PassFeatures, program: Program, num_tokens: int
) -> None:
    """Run one over the rows of a pass."""

    def rows(name: str) -> npt.NDArray[np.float32]:
        return program.rows(BUFFERS[name], num_tokens)

    match op:
        case KeepFeatures():
            features.keep(op, rows(op.src))
        case ReadFeatures():
            features.read(op, rows(op.dst), rows("x"))
        case JoinFeatures():
            features.join(op, rows("inner"), rows(op.first), rows(op.second))
        case AddInner():
            rows("h")[:, : op.hidden_size] += rows("inner")[:, : op.hidden_size]


def logits_by_depth(
    programs: Sequence[Program], batch: CPUBatch, vocab_size: int, run: Callable[[int], None]
) -> npt.NDArray[np.float32]:
    """Logits ``[N, V]`` of a drafter's pass, each row by the program that drafts at its distance;
    ``run`` runs one. V is ``vocab_size``."""
    depths_N = np.array(depths_of_rows(batch.items))[batch.logit_rows]
    logits_NV = np.empty((len(depths_N), vocab_size), dtype=np.float32)
    for depth, program in enumerate(programs):
        chosen = np.flatnonzero(depths_N == depth)
        if len(chosen):
            program.reserve(batch.num_rows)
            run(depth)
            found_NV = np.empty((len(chosen), logits_NV.shape[1]), dtype=np.float32)
            program.head(batch.logit_rows[chosen], found_NV)
            logits_NV[chosen] = found_NV
    return logits_NV
