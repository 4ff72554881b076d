"""What a model family declares: how to read its config, and where its tensors are."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ridgeline.core.spec import ModelSpec
from ridgeline.models.config import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """Where a weight lies in a checkpoint: in the whole of the tensor ``name``.

    In a family's declaration ``{i}`` stands for the layer.
    """

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Everything that is particular to one ``model_type``.

    Attributes:
        model_type: as ``config.json`` says it.
        build: turns the config into a spec.
        tensors: canonical weight name (see `lower`) to its place in a checkpoint; both sides are
            templates in ``{i}``. Names that a spec does not need do no harm.
        ignored: regular expressions for the full names of tensors that may be left over.
    """

    model_type: str
    build: Callable[[ConfigReader], ModelSpec]
    tensors: Mapping[str, TensorSource]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDefinition:
    """A checkpoint's config, understood.

    ``dtype`` is the number format that the config declares for the weights, float32 if it declares
    none.
    """

    spec: ModelSpec
    family: Family
    dtype: str

    @property
    def sources(self) -> dict[str, TensorSource]:
        """Where each weight lies, by canonical name with the layers filled in."""
        sources: dict[str, TensorSource] = {}
        for template, source in self.family.tensors.items():
            indices = range(len(self.spec.layers)) if "{i}" in template else range(1)
            for index in indices:
                name = template.replace("{i}", str(index))
                sources[name] = TensorSource(name=source.name.replace("{i}", str(index)))
        return sources

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions for the full names of tensors that may be left over."""
        if self.spec.tie_embeddings:
            return (*self.family.ignored, re.escape(self.family.tensors["head"].name))
        return self.family.ignored
