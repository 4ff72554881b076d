"""Lowering of layers that keep a state of each sequence instead of K and V.

Canonical names below ``layers.{i}.``. Of short convolutions: ``conv_in_gate``, ``conv_out_gate``,
``conv_value``, ``conv``, ``conv_out``, and the same with ``_bias``. Of the gated delta rule:
``delta_query``, ``delta_key``, ``delta_value``, ``delta_gate``, ``delta_beta``, ``delta_decay``,
``delta_conv``, ``delta_decay_log``, ``delta_decay_bias``, ``delta_norm`` and ``delta_out``. Of
Mamba-2: ``scan_mixed``, ``scan_gate``, ``scan_step`` and ``scan_out``, each perhaps with ``_bias``,
``scan_conv`` and its bias, ``scan_decay_log`` (A), ``scan_step_offset`` (the bias of Δ),
``scan_skip`` (D) and ``scan_norm``.
"""

from collections.abc import Callable

from ridgeline.core.ops import (
    ConvProject,
    DeltaProject,
    GatedDelta,
    Op,
    OutProject,
    ScanProject,
    SelectiveScan,
    ShortConv,
    Weight,
)
from ridgeline.core.spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec


def short_conv_ops(
    spec: ShortConvSpec,
    src: str,
    *,
    layer: int,
    offset: int,
    hidden_size: int,
    weight: Callable[..., Weight],
) -> list[Op]:
    """Projections, the convolution between its gates, and the projection of its output.

    ``offset`` is the layer's place in a sequence's state, and ``weight`` names a weight of the
    layer, of some shape.
    """

    def bias(name: str) -> Weight | None:
        return weight(f"{name}_bias", hidden_size) if spec.bias else None

    square = (hidden_size, hidden_size)
    return [
        ConvProject(
            in_gate=weight("conv_in_gate", *square),
            out_gate=weight("conv_out_gate", *square),
            value=weight("conv_value", *square),
            in_gate_bias=bias("conv_in_gate"),
            out_gate_bias=bias("conv_out_gate"),
            value_bias=bias("conv_value"),
            src=src,
        ),
        ShortConv(
            layer=layer,
            offset=offset,
            weight=weight("conv", hidden_size, spec.length),
            bias=bias("conv"),
        ),
        OutProject(weight=weight("conv_out", *square), bias=bias("conv_out")),
    ]


def gated_delta_ops(
    spec: GatedDeltaSpec,
    src: str,
    *,
    layer: int,
    offset: int,
    hidden_size: int,
    weight: Callable[..., Weight],
) -> list[Op]:
    """Projections, the rule with all that is around it, and the projection of its output."""
    assert spec.norm.gain
    assert not spec.norm.bias
    heads = spec.num_value_heads
    keys, values = spec.num_key_heads * spec.key_dim, heads * spec.value_dim
    return [
        DeltaProject(
            query=weight("delta_query", keys, hidden_size),
            key=weight("delta_key", keys, hidden_size),
            value=weight("delta_value", values, hidden_size),
            gate=weight("delta_gate", values, hidden_size),
            beta=weight("delta_beta", heads, hidden_size),
            decay=weight("delta_decay", heads, hidden_size),
            src=src,
        ),
        GatedDelta(
            layer=layer,
            offset=offset,
            conv=weight("delta_conv", spec.num_channels, spec.conv_length),
            decay_log=weight("delta_decay_log", heads),
            decay_bias=weight("delta_decay_bias", heads),
            gain=weight("delta_norm", spec.value_dim),
            norm=spec.norm,
            num_key_heads=spec.num_key_heads,
            num_value_heads=heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
        ),
        OutProject(weight=weight("delta_out", hidden_size, values), bias=None),
    ]


def mamba2_ops(
    spec: Mamba2Spec,
    src: str,
    *,
    layer: int,
    offset: int,
    hidden_size: int,
    weight: Callable[..., Weight],
) -> list[Op]:
    """Projections, the scan with all that is around it, and the projection of its output."""
    assert spec.norm is None or (spec.norm.gain and not spec.norm.bias)

    def bias(name: str, size: int, *, there: bool = spec.bias) -> Weight | None:
        return weight(f"{name}_bias", size) if there else None

    heads, channels = spec.num_heads, spec.num_channels
    return [
        ScanProject(
            mixed=weight("scan_mixed", channels, hidden_size),
            gate=weight("scan_gate", spec.width, hidden_size),
            step=weight("scan_step", heads, hidden_size),
            mixed_bias=bias("scan_mixed", channels),
            gate_bias=bias("scan_gate", spec.width),
            step_bias=bias("scan_step", heads),
            src=src,
        ),
        SelectiveScan(
            layer=layer,
            offset=offset,
            conv=weight("scan_conv", channels, spec.conv_length),
            conv_bias=bias("scan_conv", channels, there=spec.conv_bias),
            decay_log=weight("scan_decay_log", heads),
            step_offset=weight("scan_step_offset", heads),
            skip=weight("scan_skip", heads),
            gain=None if spec.norm is None else weight("scan_norm", spec.width),
            norm=spec.norm,
            num_heads=heads,
            head_dim=spec.head_dim,
            num_groups=spec.num_groups,
            state_dim=spec.state_dim,
            input_scales=spec.input_scales,
        ),
        OutProject(
            weight=weight("scan_out", hidden_size, spec.width), bias=bias("scan_out", hidden_size)
        ),
    ]
