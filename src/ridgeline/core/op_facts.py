"""What ops and their weights tell of themselves, beside shapes: the words for it.

Each op of `core.ops` has ``facts``, and each of its weights has a role and a split. Whoever
prices, packs, quantizes or shards a model reads these, and no list of ops of its own.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum


class OpKind(StrEnum):
    """Kernels of one kind share their efficiencies."""

    LINEAR = "linear"
    EXPERTS = "experts"
    ATTENTION = "attention"
    OTHER = "other"


class Rows(Enum):
    """The rows that an op computes of a pass."""

    TOKENS = "tokens"
    LOGITS = "logits"  # those that are wanted
    ROUTED = "routed"  # a token once for each of its experts


class Collective(Enum):
    """What the ranks exchange after an op, if there are several."""

    NONE = "none"
    ALL_REDUCE = "all-reduce"  # tensor-parallel ranks add up their partial sums
    LATER = "later"  # partial sums, which the all-reduce of the branch that they join adds up
    EXPERTS = "experts"  # tokens go to their experts' ranks and back; else an all-reduce
    ALL_GATHER = "all-gather"  # of the tensor-parallel ranks' logits
    ITSELF = "itself"  # the op is an exchange: it stands in the list of a rank's ops
    CONTEXT = "context"  # context-parallel ranks: K and V, or what attention to them came to


class Role(Enum):
    """What is done with a weight."""

    PRODUCT = "product"  # a matrix of the layers that tokens are multiplied with
    HEAD = "head"  # the matrix that gives logits
    TABLE = "table"  # of tokens; rows are looked up
    POSITIONS = "positions"  # a table of positions, or of token types
    ROUTER = "router"  # the matrix that gives logits of experts
    EXPANSION = "expansion"  # each head's matrices from latents to K and V
    OUTPUT_GATE = "output gate"  # one row, which scales an expert's output
    CONVOLUTION = "convolution"  # the weights of each channel's last inputs
    DECAY = "decay"  # the logarithm of how fast each head forgets
    SKIP = "skip"  # what each head's input is times, beside its matrix
    GAIN = "gain"  # of a norm
    BIAS = "bias"
    SINKS = "sinks"  # a logit for each head

    @property
    def is_matrix(self) -> bool:
        """Whether tokens, or latents, are multiplied with it."""
        return self in _MATRICES

    @property
    def is_table(self) -> bool:
        """Whether a token reads one row of it."""
        return self in (Role.TABLE, Role.POSITIONS)


_MATRICES = {Role.PRODUCT, Role.HEAD, Role.ROUTER, Role.EXPANSION, Role.OUTPUT_GATE}


class Split(Enum):
    """How ranks share a weight, which is stored ``[out, in]``; `core.sharding` says how many."""

    WHOLE = "whole"  # every rank has it
    ROWS = "rows"  # over the tensor-parallel ranks
    COLUMNS = "columns"  # over the tensor-parallel ranks, whose results are partial sums
    KV_HEADS = "KV heads"  # rows, but a head is never split
    EXPERT_ROWS = "expert rows"  # experts over the expert-parallel ranks, then rows
    EXPERT_COLUMNS = "expert columns"


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Of a field of an op that holds a weight."""

    role: Role
    split: Split


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Of a class of ops."""

    kind: OpKind
    rows: Rows
    collective: Collective
