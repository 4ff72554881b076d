"""Attention and feed-forward networks on ranks of their own.

MegaScale-Infer (arXiv 2504.02263) and Step-3 (arXiv 2507.19427) call it attention-FFN
disaggregation: one rank has KV, attention and all that is not a feed-forward network, the other one
the feed-forward networks. What one computes and the other reads is sent as it is, so the results
are the bits of one process.
"""

from dataclasses import replace

from ridgeline.core import ops
from ridgeline.core.ops import Op
from ridgeline.core.spec import AttentionSpec, LayerSpec, ModelSpec
from ridgeline.models.lower import lower
from ridgeline.roofline.dataflow import buffers_of

NUM_RANKS = 2
_FeedForward = (
    ops.MLP
    | ops.MoE
    | ops.SharedExpert
    | ops.AddShared
    | ops.GateUp
    | ops.SparseGateUp
    | ops.Xielu
    | ops.Down
)


def operator_part(spec: ModelSpec, rank: int) -> tuple[ModelSpec, tuple[Op, ...]]:
    """The spec and ops of rank 0, with attention, or rank 1, with the feed-forward networks.

    Rank 1 has no room for K and V; for latents and states it has, and does not use it.
    """
    own: list[Op] = []
    holders: dict[str, set[int]] = {}
    for op in lower(spec):
        place = int(isinstance(op, _FeedForward) or _is_inside(op))
        read, written = buffers_of(op, spec.hidden_size)
        for buffer, width in read.items():
            if width and place not in holders[buffer]:
                assert buffer != "inner", "a feed-forward network is cut in two"
                own.append(_sent(buffer, width, sender=1 - place, rank=rank))
                holders[buffer].add(place)
        for buffer in written:
            holders[buffer] = {place}
        if place == rank:
            own.append(op)
        if isinstance(op, ops.Head):  # from which both draw the same tokens
            logits = (0, *[op.weight.shape[0]] * NUM_RANKS)
            own.append(ops.GatherLogits(borders=logits, rank=rank))
    if rank == 1:
        spec = replace(spec, layers=tuple(map(_without_kv, spec.layers)))
    return spec, tuple(own)


def _sent(buffer: str, width: int, *, sender: int, rank: int) -> ops.Gather:
    """All of a buffer, from one of the two ranks to the other."""
    return ops.Gather(buffer=buffer, borders=(0, (1 - sender) * width, width), rank=rank)


def _without_kv(layer: LayerSpec) -> LayerSpec:
    if not isinstance(layer.attention, AttentionSpec):
        return layer
    return replace(layer, attention=replace(layer.attention, num_kv_heads=0))


def _is_inside(op: Op) -> bool:
    """Whether it normalizes what is inside a feed-forward network."""
    return isinstance(op, ops.Norm) and op.src == "inner"
