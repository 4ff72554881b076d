"""The ops that join what ranks have computed apart: gathers, which `models.shard` puts into a
rank's list, and what `models.lower` puts at the ends of a pipeline's stages."""

from dataclasses import dataclass
from typing import ClassVar

from ridgeline.core.op_facts import Collective, OpFacts, OpKind, Rows


class _Parts:
    """Of an op that joins what the ranks have: rank r has ``[borders[r], borders[r + 1])``."""

    __slots__ = ()
    borders: tuple[int, ...]
    rank: int

    @property
    def num_ranks(self) -> int:
        return len(self.borders) - 1

    @property
    def own(self) -> int:
        """What this rank has."""
        return self.borders[self.rank + 1] - self.borders[self.rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather(_Parts):
    """buffer[T, W] from all ranks' buffer[T, own]: parts of columns, side by side."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.ITSELF)
    buffer: str
    borders: tuple[int, ...]
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherTokens(_Parts):
    """x[T, D]: each row from the rank whose part of the vocabulary, ``borders``, has its token."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.ITSELF)
    borders: tuple[int, ...]
    rank: int
    hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherLogits(_Parts):
    """logits[N, V] from all ranks' logits[N, own], after the `Head`."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.LOGITS, Collective.ITSELF)
    borders: tuple[int, ...]
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherContext:
    """Part of the `KVWrite` before it: of ranges that context-parallel ranks share, all ranks have
    the blocks of K and V of one layer, until those after it, each from the rank that holds or
    computed it."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.ITSELF)
    num_kv_heads: int
    k_width: int
    v_width: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSplits:
    """Part of the attention before it: of other ranges, all ranks have what each token's attention
    to each run of KV came to (a maximum, a sum and ``width`` elements for each head), from the rank
    that holds the run, and merge them in order."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.ITSELF)
    num_heads: int
    width: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRanges:
    """h[T, D]: rows of shared ranges from the ranks that computed them; T is then that of all
    ranks."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.ITSELF)
    hidden_size: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendHidden:
    """x[T, D] goes to the next stage of the pipeline."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.ITSELF)
    hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveHidden:
    """x[T, D] comes from the stage before."""

    facts: ClassVar = OpFacts(OpKind.OTHER, Rows.TOKENS, Collective.ITSELF)
    hidden_size: int
