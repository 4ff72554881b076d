"""Lowering of a mixture of experts.

Canonical weight names, below ``layers.{i}.``: ``router``, ``router_bias``, ``correction_bias``,
``expert_scale``, ``experts.gate``, ``experts.up`` and ``experts.down`` (stacked by expert) with
``experts.gate_bias`` and so on, ``shared.gate``, ``shared.up``, ``shared.down`` and
``shared.output_gate``.
"""

from collections.abc import Callable

from ridgeline.core.ops import AddShared, MoE, Op, SharedExpert, Weight
from ridgeline.core.spec import ClampedSwiGLU, MLPSpec, MoESpec


def moe_ops(
    spec: MoESpec,
    src: str,
    *,
    hidden_size: int,
    weight: Callable[..., Weight],
    router_src: str | None = None,
) -> list[Op]:
    """The ops from ``src`` to ``h``; ``weight(name, *shape)`` names a weight of the layer."""
    assert spec.gated or not isinstance(spec.activation, ClampedSwiGLU), "which has a gate"
    count, width, routing = spec.num_experts, spec.width, spec.routing

    def bias(name: str, *shape: int) -> Weight | None:
        return weight(f"experts.{name}_bias", count, *shape) if spec.bias else None

    experts = MoE(
        router=weight("router", count, hidden_size),
        router_bias=weight("router_bias", count) if routing.bias else None,
        correction_bias=weight("correction_bias", count) if routing.correction_bias else None,
        gate=weight("experts.gate", count, width, hidden_size) if spec.gated else None,
        up=weight("experts.up", count, width, hidden_size),
        down=weight("experts.down", count, hidden_size, width),
        gate_bias=bias("gate", width) if spec.gated else None,
        up_bias=bias("up", width),
        down_bias=bias("down", hidden_size),
        routing=routing,
        activation=spec.activation,
        src=src,
        router_src=router_src,
        expert_scale=weight("expert_scale", count) if routing.expert_scale else None,
    )
    if spec.shared is None:
        return [experts]
    output_gate = weight("shared.output_gate", 1, hidden_size)
    shared_gate = weight("shared.gate", spec.shared.width, hidden_size)
    shared = SharedExpert(
        gate=shared_gate if spec.gated else None,
        up=weight("shared.up", spec.shared.width, hidden_size),
        down=weight("shared.down", hidden_size, spec.shared.width),
        output_gate=output_gate if spec.shared.gated_output else None,
        activation=spec.activation,
        src=src,
    )
    return [shared, experts, AddShared()]


def dense_ops(spec: MLPSpec, *, hidden_size: int, weight: Callable[..., Weight]) -> list[Op]:
    """The network beside experts, from ``h`` to ``shared``."""
    assert spec.gated
    assert not spec.bias
    assert not spec.xielu
    assert spec.cutoff is None
    assert spec.inner_norm is None
    gate, up = (weight(name, spec.width, hidden_size) for name in ("gate", "up"))
    down = weight("down", hidden_size, spec.width)
    return [SharedExpert(gate=gate, up=up, down=down, output_gate=None, activation=spec.activation)]
