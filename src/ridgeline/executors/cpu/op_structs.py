"""What native ops are told of a model's, beside weights: structs, and how wide buffers are."""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from ridgeline.core import ops
from ridgeline.core.spec import (
    Activation,
    ClampedSwiGLU,
    GroupScore,
    ModelSpec,
    NormKind,
    NormSpec,
    RoutingSpec,
    Scoring,
)
from ridgeline.kernels.cpu.structs import RlActivation, RlBuffer, RlNorm, RlRouting, RlXielu

_ACTIVATIONS = {
    Activation.SILU: 0,
    Activation.GELU: 1,
    Activation.GELU_TANH: 2,
    Activation.RELU: 3,
    Activation.RELU_SQUARED: 5,
    Activation.IDENTITY: 6,
}
_CLAMPED_SWIGLU = 4


def norm_struct(spec: NormSpec) -> RlNorm:
    """A norm, without its weights."""
    return RlNorm(
        kind=0 if spec.kind is NormKind.RMS else 1, unit_offset=spec.unit_offset, eps=spec.eps
    )


def activation_struct(activation: Activation | ClampedSwiGLU) -> RlActivation:
    """A non-linearity, with its constants."""
    if isinstance(activation, ClampedSwiGLU):
        return RlActivation(kind=_CLAMPED_SWIGLU, alpha=activation.alpha, limit=activation.limit)
    return RlActivation(kind=_ACTIVATIONS[activation])


def routing_struct(spec: RoutingSpec, router: ops.Weight) -> RlRouting:
    """How experts are chosen and weighed."""
    groups = spec.groups
    return RlRouting(
        num_experts=router.shape[0],
        top_k=spec.top_k,
        scoring=0 if spec.scoring is Scoring.SOFTMAX else 1,
        normalised=spec.normalised,
        scale=spec.scale,
        num_groups=groups.num_groups if groups else 0,
        top_groups=groups.top_groups if groups else 0,
        group_best_two=bool(groups and groups.score is GroupScore.BEST_TWO),
        scales_inputs=spec.scales_inputs,
    )


def xielu_struct(op: ops.Xielu, vectors: Mapping[str, npt.NDArray[np.float32]]) -> RlXielu:
    """The numbers of xIELU as they are used."""
    rise, fall, beta, eps = (
        float(vectors[weight.name].item()) for weight in (op.rise, op.fall, op.beta, op.eps)
    )
    softplus = (float(np.logaddexp(0.0, each)) for each in (rise, fall))
    return RlXielu(rise=next(softplus), fall=beta + next(softplus), beta=beta, eps=eps)


def widths(spec: ModelSpec, model_ops: Iterable[ops.Op]) -> list[int]:
    """Elements per token of each buffer."""
    found = [spec.hidden_size] * 4 + [1] * (len(RlBuffer) - 4)

    def at_least(buffer: RlBuffer, width: int) -> None:
        found[buffer] = max(found[buffer], width)

    for op in model_ops:
        match op:
            case ops.QKVProject():
                at_least(RlBuffer.QUERY, op.query.shape[0])
                values = op.value or op.key
                for buffer, weight in ((RlBuffer.KEY, op.key), (RlBuffer.VALUE, values)):
                    at_least(buffer, 0 if weight is None else weight.shape[0])
            case ops.LatentProject():
                at_least(RlBuffer.QUERY, op.query.shape[0])
                at_least(RlBuffer.KEY, op.latent.shape[0])
            case ops.ConvProject():
                for buffer in (RlBuffer.QUERY, RlBuffer.KEY, RlBuffer.VALUE):
                    at_least(buffer, op.value.shape[0])
            case ops.DeltaProject():
                mixed = sum(part.shape[0] for part in (op.query, op.key, op.value))
                at_least(RlBuffer.QUERY, mixed)
                at_least(RlBuffer.KEY, op.gate.shape[0])
                at_least(RlBuffer.VALUE, 2 * op.beta.shape[0])
            case ops.ScanProject():
                at_least(RlBuffer.QUERY, op.mixed.shape[0])
                at_least(RlBuffer.KEY, op.gate.shape[0])
                at_least(RlBuffer.VALUE, 2 * op.step.shape[0])
            case ops.SplitStreams():
                at_least(RlBuffer.STREAMS, (1 + len(op.weights)) * spec.hidden_size)
            case ops.LayerEmbed():
                at_least(RlBuffer.LAYERS, op.table.shape[1])
            case ops.OutProject():
                at_least(RlBuffer.H, op.weight.shape[1])
            case ops.Down():
                at_least(RlBuffer.INNER, op.weight.shape[1])
            case ops.JoinFeatures():
                at_least(RlBuffer.INNER, 2 * op.hidden_size)
            case ops.AddInner():
                at_least(RlBuffer.INNER, op.hidden_size)
    return found
