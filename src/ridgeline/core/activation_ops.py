"""Activations that are ops of their own, since they have weights. `core.ops` has the shapes."""

from dataclasses import dataclass
from typing import ClassVar

from ridgeline.core.op_facts import Collective, OpFacts, OpKind, Rows
from ridgeline.core.op_weights import Gain


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
