"""What a device's memory is divided into: weights, KV, and what steps need beside them."""

from collections.abc import Iterable, Sequence

import torch

from ridgeline.core import ops
from ridgeline.core.spec import ModelSpec
from ridgeline.executors.cuda.adjustments import adjustment_bytes
from ridgeline.executors.cuda.device import DeviceMemory

# Workspaces of libraries, recorded graphs, kernels, and fragments.
_RUNTIME_BYTES, _RUNTIME_SHARE = 512 << 20, 0.05


def kv_budget_bytes(
    memory: DeviceMemory,
    models: Iterable[tuple[ModelSpec, Sequence[ops.Op], torch.dtype]],
    *,
    memory_share: float,
    num_tokens: int,
    num_rows: int,
) -> int:
    """Bytes for KV, now that the weights are loaded: the share less what is in use, less what the
    largest step needs (``num_tokens`` tokens, ``num_rows`` rows of logits), and less what changes
    the logits of as many sequences."""
    models = tuple(models)
    in_use = memory.total - memory.free
    largest = max(
        activation_bytes(spec, model_ops, dtype, num_tokens=num_tokens, num_rows=num_rows)
        for spec, model_ops, dtype in models
    )
    kept = max(adjustment_bytes(num_rows, spec.vocab_size) for spec, _, _ in models)
    runtime = min(_RUNTIME_BYTES, int(memory.total * _RUNTIME_SHARE))
    return max(0, int(memory.total * memory_share) - in_use - largest - kept - runtime)


def activation_bytes(
    spec: ModelSpec,
    model_ops: Sequence[ops.Op],
    dtype: torch.dtype,
    *,
    num_tokens: int,
    num_rows: int,
) -> int:
    """Bytes that a step of that size holds at once beside weights and KV, at the most.

    The residual, a branch and its input live at the same time as what the widest op reads and
    writes; logits are there in the model's type, in float32, and once more as they are sampled.
    """
    widest = max(map(_op_width, model_ops))
    residuals = spec.streams.num_streams if spec.streams else 0
    hidden = num_tokens * ((4 + residuals) * spec.hidden_size + widest) * dtype.itemsize
    return hidden + num_rows * spec.vocab_size * (dtype.itemsize + 4 + 4)


def _op_width(op: ops.Op) -> int:
    """Elements that an op reads and writes for each token, its inner ones included."""
    match op:
        case ops.QKVProject():
            return 2 * (op.num_heads + 2 * op.num_kv_heads) * op.head_dim
        case ops.MLP() | ops.SharedExpert() | ops.GateUp() | ops.SparseGateUp():
            return 3 * op.up.shape[0]
        case ops.MoE():
            return op.routing.top_k * (3 * op.up.shape[1] + 2 * op.down.shape[1])
        case ops.LatentAttend():
            return op.num_heads * (3 * (op.latent_dim + op.rope_dim) + op.v_dim)
        case ops.OutProject() | ops.Down():
            return 2 * op.weight.shape[1]
        case ops.GrowQueries():
            return 2 * op.num_heads * op.head_dim
        case ops.Gather() | ops.GatherTokens() | ops.GatherLogits():
            return op.own
        case ops.Attend() | ops.LatentProject() | ops.HeadNorm() | ops.Rope() | ops.KVWrite():
            return 0  # no more than the projections beside them
        case ops.BidirectionalAttend():
            return 0
        case ops.GatherContext() | ops.GatherSplits() | ops.GatherRanges():
            return 0
        case ops.Embed() | ops.Norm() | ops.AddShared() | ops.AddResidual() | ops.Head():
            return 0  # hidden states, which are counted already, and logits
        case ops.LayerEmbed():
            return 3 * op.projection.shape[0]
        case ops.LayerInput():
            return 2 * op.width
        case ops.Xielu():
            return 4 * op.width
        case ops.SplitStreams() | ops.JoinStreams():
            return 2 * sum(weight.shape[0] for weight in op.weights)
        case ops.PredictStreams() | ops.CorrectStreams():
            return 2 * op.num_streams * op.gain.shape[0]
        case ops.AddToStreams() | ops.AddLaurel():
            return 0  # no more than the ops above
        case ops.ScaleHidden() | ops.SendHidden() | ops.ReceiveHidden():
            return 0
        case ops.KeepFeatures() | ops.ReadFeatures() | ops.JoinFeatures() | ops.AddInner():
            raise AssertionError("of a drafter that this executor refuses")
        case ops.GateHeads():
            return 2 * op.weight.shape[0]
        case (
            ops.ConvProject()
            | ops.ShortConv()
            | ops.DeltaProject()
            | ops.GatedDelta()
            | ops.ScanProject()
            | ops.SelectiveScan()
        ):
            raise AssertionError("a model with states, which this executor refuses")
