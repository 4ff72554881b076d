"""One vector of a sequence's hidden states: how it is made, and what becomes of it.

Names are those of sentence-transformers, whose files (``modules.json``, ``1_Pooling/config.json``)
say it for a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Pooling(StrEnum):
    """Which final hidden states count: the first's (CLS), the last's, or all of them."""

    CLS = "cls"
    LAST = "lasttoken"
    MEAN = "mean"
    MAX = "max"
    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"

    @property
    def needs_all(self) -> bool:
        """Whether it reads every position's hidden state, not the last one's alone."""
        return self is not Pooling.LAST


class Squash(StrEnum):
    """What a dense layer's output goes through (torch's names, in lower case)."""

    IDENTITY = "identity"
    TANH = "tanh"
    GELU = "gelu"
    RELU = "relu"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """out = squash(weight · x + bias): names of the tensors in the file at ``path``.

    ``path`` is relative to the model's folder; "" stands for its own weights. The weight has
    ``[width, in]`` elements; with ``rows`` it is that row of a larger matrix, less the second one
    if there are two. ``norm_eps``: a LayerNorm by the tensors ``norm`` (weight, and bias if there
    is one) follows.
    """

    path: str
    weight: tuple[str, ...]
    bias: tuple[str, ...] | None
    width: int
    squash: Squash = Squash.IDENTITY
    norm: tuple[str, ...] = ()
    norm_eps: float = 0.0
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpec:
    """What a model makes of hidden states, beside text.

    Attributes:
        pooling: how one vector is made of them.
        layers: dense layers that it goes through, in order.
        normalize: whether it is divided by its length then.
        num_labels: for a classifier, the scores that the last layer gives; ``None`` for embeddings.
        score: what makes a relevance of a classifier's only score.
        is_declared: whether the checkpoint says that embeddings or scores are what it is for.
        max_tokens: the longest text that it is used for, special tokens included.
        prompts: texts that go before an input, by what for.
        default_prompt: the name of the one that is used where none is named.
        lower_case: whether texts that are embedded are written in lower case first.
        pairs_by_template: whether pairs are rendered by the chat template, as messages of the roles
            query and document.
        refusal: what of the checkpoint's pooling is not supported, if anything.
    """

    pooling: Pooling = Pooling.LAST
    layers: tuple[DenseSpec, ...] = ()
    normalize: bool = True
    num_labels: int | None = None
    score: Squash = Squash.SIGMOID
    is_declared: bool = False
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lower_case: bool = False
    pairs_by_template: bool = False
    refusal: str | None = None
