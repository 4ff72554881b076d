"""The ops of per-layer embeddings, which each layer adds to the residual (Gemma 3n and 4).

`core.ops` has the shapes and the buffers. L is the number of layers, p the width of a layer's
embedding.
"""

from dataclasses import dataclass
from typing import ClassVar

from ridgeline.core.op_facts import Collective, OpFacts, OpKind, Rows
from ridgeline.core.op_weights import Gain, WholeProduct, WholeTable
from ridgeline.core.spec import Activation, NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEmbed:
    """layers[T, L·p] = (table[token ids] · √p + norm(x times a matrix · D^-½)) · 2^-½; the norm is
    over each layer's p, with one gain[p] for all of them, and x the embedding. Tokens that the
    table lacks have its first row."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    table: WholeTable
    projection: WholeProduct
    gain: Gain
    norm: NormSpec

    @property
    def width(self) -> int:
        """Of a layer's embedding."""
        return self.gain.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """h[T, D] = (act(x times gate) · layers[T, first:first + p]) times up."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    gate: WholeProduct
    up: WholeProduct
    activation: Activation
    first: int

    @property
    def width(self) -> int:
        """Of the layer's embedding."""
        return self.gate.shape[0]
