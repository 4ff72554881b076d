"""The ops of drafters that read hidden states: copies between native buffers and those kept."""

import numpy as np
import numpy.typing as npt

from ridgeline.core.ops import FeatureOp, JoinFeatures, KeepFeatures, ReadFeatures
from ridgeline.executors.cpu.program import BUFFERS, Program
from ridgeline.executors.features import PassFeatures


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
