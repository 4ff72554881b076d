"""The ops of drafters that read the target's hidden states (EAGLE-3, arXiv 2503.01840; MTP;
Medusa).

`core.ops` has the shapes and the buffers. A row of the drafter at position p has the embedding of
token p + 1 and the features of position p, so a drafter has no row of the first token.
"""

from dataclasses import dataclass
from typing import ClassVar

from ridgeline.core.op_facts import Collective, OpFacts, OpKind, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepFeatures:
    """features[T, first:first + width] = src[T, width], of the ``total`` elements that a token has.

    Those of the target are for the drafter's next pass, those of the drafter for its own next.
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    src: str
    first: int
    width: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFeatures:
    """inner[T, W] = the target's features of the position before, and x[T, D] = 0; or, where the
    token before was drafted in this plan, inner = 0 and x = the drafter's own features of it.

    ``alike``: both mean the same, so h[T, W] has either, and x = 0.
    """

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    width: int
    hidden_size: int
    alike: bool = False

    @property
    def dst(self) -> str:
        """The buffer that gets the target's features."""
        return "h" if self.alike else "inner"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinFeatures:
    """inner[T, 2·D] = first[T, D] and second[T, D], side by side."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    first: str
    second: str
    hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AddInner:
    """h[T, D] += inner[T, D]."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.NONE)
    hidden_size: int
