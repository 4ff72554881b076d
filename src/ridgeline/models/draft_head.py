"""A draft head (EAGLE-3, Medusa, a layer for multi-token prediction) as a family reads it."""

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.core.spec import DraftHeadSpec
from ridgeline.models.family import TensorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadDefinition:
    """A draft head's config, understood for one target.

    Attributes:
        spec: the head's shape.
        sources: where each of its weights is in its file.
        borrowed: the weights that its file lacks, and which of the target's they are.
        ignored: patterns of tensors of its file that are not read.
        unknown: keys of its config that nobody read.
    """

    spec: DraftHeadSpec
    sources: Mapping[str, TensorSource]
    borrowed: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
