"""The ops of a drafter that reads the target's hidden states (EAGLE-3, MTP, Medusa).

Its weights: ``embed`` and ``head`` (the target's, where it has none), ``token_norm``,
``features_norm`` (of EAGLE-3), ``fc``, ``hidden_norm``, ``final_norm``, and those of its layers,
which are numbered behind the target's. Of Medusa's head n the blocks ``heads.{n}.{block}``, with a
bias each, and ``heads.{n}.out``.
"""

from dataclasses import replace

from ridgeline.core.cache_groups import kv_groups
from ridgeline.core.ops import (
    AddInner,
    AddResidual,
    Down,
    Embed,
    GateUp,
    Head,
    JoinFeatures,
    KeepFeatures,
    Norm,
    Op,
    QKVProject,
    ReadFeatures,
    Weight,
)
from ridgeline.core.spec import Activation, EagleSpec, MedusaSpec, ModelSpec, MTPSpec
from ridgeline.models.lower_layer import LayerLowering


def lower_head(spec: ModelSpec) -> tuple[Op, ...]:
    """The ops of ``spec.draft_head``, in order; rows of its logits are its own tokens'."""
    head = spec.draft_head
    assert head is not None, "the model has no drafter of its own"
    match head:
        case MTPSpec():
            return _lower_mtp(spec, head)
        case MedusaSpec():
            return _lower_medusa(spec, head, 0)
        case EagleSpec():
            return _lower_eagle(spec, head)


def lower_later_heads(spec: ModelSpec) -> tuple[tuple[Op, ...], ...]:
    """The ops that draft the second token, the third, and so on, where each has a head."""
    head = spec.draft_head
    if not isinstance(head, MedusaSpec):
        return ()
    return tuple(_lower_medusa(spec, head, index) for index in range(1, head.num_heads))


def _lower_medusa(spec: ModelSpec, head: MedusaSpec, index: int) -> tuple[Op, ...]:
    hidden = spec.hidden_size
    rows = (spec.vocab_size, hidden)
    ops: list[Op] = [
        Embed(weight=Weight(name="embed", shape=rows), scale=1.0),
        ReadFeatures(width=hidden, hidden_size=hidden, alike=True),
        KeepFeatures(src="h", first=0, width=hidden, total=hidden),
    ]
    for block in range(head.num_blocks):
        name = f"heads.{index}.{block}"
        up = GateUp(
            gate=None,
            up=Weight(name=name, shape=(hidden, hidden)),
            gate_bias=None,
            up_bias=Weight(name=f"{name}_bias", shape=(hidden,)),
            activation=Activation.SILU,
            src="h",
        )
        ops += [up, AddInner(hidden_size=hidden)]
    return (*ops, Head(weight=Weight(name=f"heads.{index}.out", shape=rows), softcap=None))


def _lower_mtp(spec: ModelSpec, head: MTPSpec) -> tuple[Op, ...]:
    hidden, index = spec.hidden_size, len(spec.layers)
    group = next(n for n, group in enumerate(kv_groups(spec)) if index in group.layers)

    def norm(src: str, dst: str, name: str) -> Norm:
        gain = Weight(name=name, shape=(hidden,))
        return Norm(src=src, dst=dst, weight=gain, spec=head.norm)

    first, second = ("h", "n") if head.features_first else ("n", "h")
    rows = (spec.vocab_size, hidden)
    return (
        Embed(weight=Weight(name="embed", shape=rows), scale=spec.embedding_scale),
        norm("x", "n", "token_norm"),
        ReadFeatures(width=hidden, hidden_size=hidden, alike=True),
        norm("h", "h", "hidden_norm"),
        JoinFeatures(first=first, second=second, hidden_size=hidden),
        Down(weight=Weight(name="fc", shape=(hidden, 2 * hidden)), bias=None),
        AddResidual(),  # x is 0
        *LayerLowering(index, group, hidden, 0).ops(head.layer, None),
        norm("x", "h", "final_norm"),
        KeepFeatures(src="h", first=0, width=hidden, total=hidden),
        Head(
            weight=Weight(name="head", shape=rows),
            softcap=spec.logit_softcap,
            scale=spec.logit_scale,
        ),
    )


def _lower_eagle(spec: ModelSpec, head: EagleSpec) -> tuple[Op, ...]:
    hidden, width = head.hidden_size, len(head.feature_layers) * spec.hidden_size

    def norm(src: str, dst: str, name: str, width: int = hidden) -> Norm:
        gain = Weight(name=name, shape=(width,))
        return Norm(src=src, dst=dst, weight=gain, spec=head.norm)

    normed = "x" if head.norm_residual else "h"
    ops: list[Op] = [
        Embed(weight=Weight(name="embed", shape=(spec.vocab_size, hidden)), scale=1.0),
        norm("x", "n", "token_norm"),
        ReadFeatures(width=width, hidden_size=hidden),
        *([norm("inner", "inner", "features_norm", width)] if head.norm_features else []),
        Down(weight=Weight(name="fc", shape=(hidden, width)), bias=None),
        AddResidual(),  # x is its own features of a token that it drafted
        norm("x", normed, "hidden_norm"),
        JoinFeatures(first="n", second=normed, hidden_size=hidden),
    ]
    group_of = {layer: n for n, group in enumerate(kv_groups(spec)) for layer in group.layers}
    for place, layer in enumerate(head.layers):
        index = len(spec.layers) + place
        lowered = LayerLowering(index, group_of[index], hidden, 0).ops(layer, None)
        ops += lowered if place else [_of_both(op, hidden) for op in lowered]
    kept = KeepFeatures(src="h" if head.norm_output else "x", first=0, width=hidden, total=hidden)
    rows = Weight(name="head", shape=(head.vocab_size, hidden))
    return (*ops, norm("x", "h", "final_norm"), kept, Head(weight=rows, softcap=None))


def _of_both(op: Op, hidden_size: int) -> Op:
    """An op of the first layer, which reads embedding and features together."""
    if not isinstance(op, QKVProject):
        return op

    def wide(weight: Weight | None) -> Weight | None:
        if weight is None:
            return None
        return replace(weight, shape=(weight.shape[0], 2 * hidden_size))

    query = wide(op.query)
    assert query is not None
    return replace(op, src="inner", query=query, key=wide(op.key), value=wide(op.value))
