"""Activations that are ops of their own: they have weights, or see all of a row.

`core.ops` has the shapes.
"""

from dataclasses import dataclass
from typing import ClassVar

from ridgeline.core.op_facts import Collective, OpFacts, OpKind, Rows
from ridgeline.core.op_weights import Gain, WholeProduct
from ridgeline.core.spec import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Xielu:
    """inner[T, F] = ζ(rise) · x² + beta · x where x = inner[T, F] is positive, and else
    (beta + ζ(fall)) · (expm1(min(x, eps)) − x) + beta · x, for ζ(a) = ln(1 + eᵃ).

    ``rise``[1], ``fall``[1], ``beta``[] and ``eps``[].
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    width: int
    rise: Gain
    fall: Gain
    beta: Gain
    eps: Gain


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseGateUp:
    """inner[T, F] = act(max(0, g − mean(g) − cutoff · σ(g))) · up src, for g = gate src and its
    standard deviation σ over all F (Gaussian top-k: Gemma 3n)."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    gate: WholeProduct
    up: WholeProduct
    activation: Activation
    cutoff: float
    src: str = "h"
