"""The ops of several residual streams (AltUp), of which a layer computes the first, and of LAuReL,
the low-rank branch beside attention (Gemma 3n).

`core.ops` has the shapes and the buffers. n is the number of streams; what a row is routed by is
m[T, n] = tanh(router · norm(row) / D).
"""

from dataclasses import dataclass
from typing import ClassVar

from ridgeline.core.op_facts import Collective, OpFacts, OpKind, Rows
from ridgeline.core.op_weights import Gain, Router, WholeProduct
from ridgeline.core.spec import NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStreams:
    """streams[T, n, D] = x, and x times each matrix, scaled to the root mean square of x."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    weights: tuple[WholeProduct, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictStreams:
    """streams[T, j] += Σ_i streams[T, i] · (coefs · m)[j·n + i], where the first stream makes m;
    and x is then that stream."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    router: Router
    gain: Gain
    norm: NormSpec
    coefs: Gain  # [n², n]

    @property
    def num_streams(self) -> int:
        return self.router.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectStreams:
    """streams[T, j] += (x − streams[T, 0]) · (1 + (coefs · m)[j]), where x makes m; and x is then
    the first stream, times ``scale`` if there is one."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    router: Router
    gain: Gain
    norm: NormSpec
    coefs: Gain  # [n, n]
    scale: Gain | None

    @property
    def num_streams(self) -> int:
        return self.router.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddToStreams:
    """streams[T, j] += h[T, D] for all but the first."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    num_streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinStreams:
    """x[T, D] = the mean of the first stream and of the others times their matrices, scaled to the
    root mean square of the first."""

    facts: ClassVar = OpFacts(OpKind.LINEAR, Rows.TOKENS, Collective.NONE)
    weights: tuple[WholeProduct, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddLaurel:
    """x[T, D] = (x + h + n + shared) · 2^-½: attention, its input, and the low-rank branch."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
