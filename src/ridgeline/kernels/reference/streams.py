"""Several residual streams, as ``Gemma3nTextModel`` and ``Gemma3nTextAltUp`` compute them.

Shapes: n streams, of which a buffer has rows [T, n · D].
"""

from collections.abc import Callable, MutableMapping

import torch
from torch.nn import functional

from ridgeline.core import ops
from ridgeline.kernels.reference.elementwise import wide
from ridgeline.kernels.reference.norm import normalise

_LEAST_SQUARE = 1e-5  # the smallest mean square that a stream is divided by


def run_stream_op(
    op: ops.StreamOp,
    buffers: MutableMapping[str, torch.Tensor],
    product: Callable[[torch.Tensor, ops.Weight], torch.Tensor],
    tensor: Callable[[ops.Weight], torch.Tensor],
) -> None:
    """Run one op on the buffers ``streams``, ``x`` and ``h``; ``product`` is x times a matrix."""
    match op:
        case ops.SplitStreams():
            x_TD = buffers["x"]
            others = [_scaled_like(product(x_TD, weight), x_TD) for weight in op.weights]
            buffers["streams"] = torch.cat([x_TD, *others], dim=1)
        case ops.PredictStreams():
            count = op.num_streams
            streams_TnD = torch.unflatten(buffers["streams"], 1, (count, -1))
            coefs_Tc = _coefs(op, streams_TnD[:, 0], product, tensor)
            mixed_TnD = streams_TnD
            for i in range(count):
                mixed_TnD = mixed_TnD + coefs_Tc[:, i::count, None] * streams_TnD[:, i, None]
            buffers["streams"], buffers["x"] = mixed_TnD.flatten(1), mixed_TnD[:, 0]
        case ops.CorrectStreams():
            streams_TnD = torch.unflatten(buffers["streams"], 1, (op.num_streams, -1))
            factors_Tn = 1 + _coefs(op, buffers["x"], product, tensor)
            change_TD = buffers["x"] - streams_TnD[:, 0]
            streams_TnD = streams_TnD + factors_Tn[..., None] * change_TD[:, None]
            x_TD = streams_TnD[:, 0]
            buffers["streams"] = streams_TnD.flatten(1)
            buffers["x"] = x_TD if op.scale is None else x_TD * tensor(op.scale)
        case ops.AddToStreams():
            first_TD, *rest = buffers["streams"].chunk(op.num_streams, dim=1)
            added = [other_TD + buffers["h"] for other_TD in rest]
            buffers["streams"] = torch.cat([first_TD, *added], dim=1)
        case ops.JoinStreams():
            own, *rest = buffers["streams"].chunk(1 + len(op.weights), dim=1)
            joined = [
                _scaled_like(product(other, weight), own)
                for other, weight in zip(rest, op.weights, strict=True)
            ]
            buffers["x"] = torch.stack([own, *joined]).mean(0)


def _scaled_like(rows_TD: torch.Tensor, like_TD: torch.Tensor) -> torch.Tensor:
    """Rows with the root mean square of others."""
    own, other = (wide(each).square().mean(-1, keepdim=True) for each in (rows_TD, like_TD))
    return (rows_TD * (other / own.clamp_min(_LEAST_SQUARE)).sqrt()).to(rows_TD.dtype)


def _coefs(
    op: ops.PredictStreams | ops.CorrectStreams,
    x_TD: torch.Tensor,
    product: Callable[[torch.Tensor, ops.Weight], torch.Tensor],
    tensor: Callable[[ops.Weight], torch.Tensor],
) -> torch.Tensor:
    """coefs · tanh(router · norm(x) / D), a row for each of ``coefs``."""
    routed = normalise(x_TD, tensor(op.gain), op.norm) * x_TD.shape[1] ** -1
    m_Tn = torch.tanh(product(routed, op.router))
    return (m_Tn[:, None] * tensor(op.coefs)).sum(-1)


def above_cutoff(gate_TF: torch.Tensor, cutoff: float) -> torch.Tensor:
    """`core.ops.SparseGateUp`'s gates, before the activation."""
    gates = wide(gate_TF)
    deviation, mean = torch.std_mean(gates, dim=-1, keepdim=True, correction=0)
    return functional.relu(gates - mean - cutoff * deviation).to(gate_TF.dtype)
