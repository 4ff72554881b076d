"""The ops of layers that keep states in place of KV: short convolutions, the gated delta rule,
Mamba-2's state space.

`core.ops` has the shapes and the buffers. K and G are key heads and value heads, L the length of a
convolution.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ridgeline.core.arrays import Array
from ridgeline.core.op_facts import Collective, OpFacts, OpKind, Rows
from ridgeline.core.op_weights import Bias, Convolution, Decay, Gain, Product, Skip
from ridgeline.core.spec import NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvProject:
    """q[T, D], k[T, D], v[T, D] = src[T, D] times three matrices, plus biases if any: the gates of
    a short convolution's input and of its output, and what is convolved."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    in_gate: Product
    out_gate: Product
    value: Product
    in_gate_bias: Bias | None
    out_gate_bias: Bias | None
    value_bias: Bias | None
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """h[T, D] = k · (Σ_j weight[:, j] · u[t − L + 1 + j] + bias) of u = q · v; weight is [D, L].

    The sequence's state has the last L − 1 rows of u, oldest first, from element ``offset`` on;
    before its first token these are 0.
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    layer: int
    offset: int
    weight: Convolution
    bias: Bias | None

    @property
    def state_elements(self) -> int:
        """Of a sequence's state."""
        channels, length = self.weight.shape
        return (length - 1) * channels

    product_elements: ClassVar = 0  # a sum of a few inputs is no product of matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaProject:
    """From src[T, D]: q[T, 2·K·d + G·v], which is query, key and value side by side, k[T, G·v], the
    gate of the output, and v[T, 2·G], beta and decay, for G value heads and K key heads."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    query: Product
    key: Product
    value: Product
    gate: Product
    beta: Product
    decay: Product
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """h[T, G·v] of what `DeltaProject` gives, token by token (arXiv 2412.06464, equation 10).

    q passes a causal convolution and SiLU: q = silu(Σ_j conv[:, j] · q[t − L + 1 + j]). Of the
    result each head of query and key is divided by its length (‖x‖² + 1e-6)^½, the query by d^½ as
    well. With a = exp(−exp(decay_log) · softplus(decay + decay_bias)) and b = σ(beta), the head's
    matrix S[d, v] becomes a·S + key ⊗ b·(value − (a·S)ᵀ key), and its output is Sᵀ query, normed
    and multiplied by silu(gate).

    The sequence's state has the last L − 1 rows of q before the convolution, oldest first, from
    element ``offset`` on, and then S of each value head; before its first token these are 0.
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    layer: int
    offset: int
    conv: Convolution
    decay_log: Decay
    decay_bias: Bias
    gain: Gain
    norm: NormSpec
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def state_elements(self) -> int:
        """Of a sequence's state."""
        channels, length = self.conv.shape
        return (length - 1) * channels + self.num_value_heads * self.key_dim * self.value_dim

    @property
    def product_elements(self) -> int:
        """That a token is multiplied with: S is read by the key, changed, and read by the query."""
        return 3 * self.num_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanProject:
    """From src[T, D]: q[T, H·p + 2·G·n], which is x, B and C side by side, k[T, H·p], the gate of
    the output, and v[T, H], the steps, plus biases if any."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    mixed: Product
    gate: Product
    step: Product
    mixed_bias: Bias | None
    gate_bias: Bias | None
    step_bias: Bias | None
    src: str = "h"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveScan:
    """h[T, H·p] of what `ScanProject` gives, token by token (arXiv 2405.21060, equation 1 with the
    scalar A of §3), for H heads of p elements, G groups of B and C, and n elements of each of them.

    q, of which ``input_scales`` multiply x, B and C, passes a causal convolution and SiLU, as
    before `GatedDelta`, plus a bias if any. With s = softplus(step + step_offset), the head's
    matrix S[n, p] becomes
    exp(−exp(decay_log) · s) · S + B ⊗ s·x, and its output is Sᵀ C + skip · x. That is multiplied by
    silu(gate), and of each group of heads normed together, with a gain[H·p], if there is a norm.

    The sequence's state has the last L − 1 rows of q as projected, oldest first, from element
    ``offset`` on, and then S of each head; before its first token these are 0.
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    layer: int
    offset: int
    conv: Convolution
    conv_bias: Bias | None
    decay_log: Decay
    step_offset: Bias
    skip: Skip
    gain: Gain | None
    norm: NormSpec | None
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    input_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)

    @property
    def conv_scales(self) -> Array:
        """float32 ``[channels]``: what the convolution's weights are multiplied by instead of q."""
        groups = self.num_groups * self.state_dim
        sizes = [self.num_heads * self.head_dim, groups, groups]
        return np.repeat(np.asarray(self.input_scales, dtype=np.float32), sizes)

    @property
    def state_elements(self) -> int:
        """Of a sequence's state."""
        channels, length = self.conv.shape
        return (length - 1) * channels + self.num_heads * self.state_dim * self.head_dim

    @property
    def product_elements(self) -> int:
        """That a token is multiplied with: S takes in B ⊗ x, and is read by C."""
        return 2 * self.num_heads * self.state_dim * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GateHeads:
    """h[T, H·d] *= σ(src[T, D] times a matrix, plus a bias if any)."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    weight: Product
    bias: Bias | None
    src: str = "n"
